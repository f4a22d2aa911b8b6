"""DiLoCo in parts: each fragment of the parameters meets at its own time, and arrives late."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._base import AxisName, PyTree
from jaxcomm._per_worker import per_worker
from jaxcomm._when import run_when
from jaxcomm.aggregation import mean
from jaxcomm.synchronization._local_sgd import of_the_first, period_of
from jaxcomm.synchronization._require import require_transformation


class FragmentState(NamedTuple):
    """Of one fragment, equal on all workers but for what the aggregator marks."""

    anchor: list[jax.Array]  # the global parameters after its last meeting
    aggregator: Any
    outer: Any


class StreamingState(NamedTuple):
    """The state of the meetings of `streaming_diloco`."""

    step: jax.Array  # int32[], steps so far
    fragments: tuple[FragmentState, ...]


def _split_evenly(params: PyTree, fragments: int) -> list[int]:
    """The fragment of each leaf: leaves in order, as equal in size as that order allows."""
    sizes = [x.size for x in jax.tree.leaves(params)]
    if fragments > len(sizes):
        raise ValueError(
            f"`fragments`={fragments} is more than the {len(sizes)} leaves of the parameters."
        )
    found: list[int] = []
    before, total = 0, max(sum(sizes), 1)
    for number, size in enumerate(sizes):
        # Where its middle lies; and so that no fragment is left without a leaf.
        wanted = int((before + size / 2) / total * fragments)
        lowest = max(found[-1] if found else 0, fragments - (len(sizes) - number))
        highest = (found[-1] + 1) if found else 0
        found.append(min(max(wanted, lowest), highest))
        before += size
    return found


def streaming_diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    period: int,
    *,
    fragments: int,
    overlap: int = 0,
    mixing: float = 0.0,
    aggregator: optax.GradientTransformation | None = None,
    split: Callable[[PyTree], list[int]] | None = None,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""DiLoCo whose parameters meet in fragments, one after the other, and are taken in late.

    Of fragment :math:`p` of P, with the offset :math:`o_p = \lfloor p H / P \rfloor`, and after
    the own step :math:`x_i \gets x_i + \mathrm{inner}(g_i)` with the number :math:`t`,

    .. math:: t \equiv o_p \;(\mathrm{mod}\; H): \quad &
                  a \gets a + \mathrm{outer}\Big(\frac{1}{n} \sum_i (a - x_i)\Big) \\
              t \equiv o_p + \tau \;(\mathrm{mod}\; H): \quad &
                  x_i \gets \alpha x_i + (1 - \alpha)\, a

    from the H-th step on. A step sends one fragment at most: the most that a link has to carry
    falls by P, and the average is that of :func:`diloco`. A result may be :math:`\tau` steps on its
    way. It is a pure state machine: the program waits for it in the step in which it is sent,
    unless the runtime overlaps steps.

    Args:
      inner: Any optax optimizer, of each worker by itself.
      outer: Any, of what workers have moved. A state of it for each fragment.
      period: H, an int of at least 1.
      fragments: P, at most the number of leaves and at most H.
      overlap: :math:`\tau`, steps from a meeting until workers take the result in, below H.
      mixing: :math:`\alpha` in [0, 1), what is kept of a worker's own.
      aggregator: Forms the mean, and so decides what is sent. Default: the exact one.
      split: From the parameters to the number of the fragment of each leaf, in order; such as every
        P-th layer. Default: leaves in order, about equal in size.
      axis_name: The mesh axis, or axes, that number the workers.

    Returns:
      A whole transformation, on parameters that differ by worker (:func:`jaxcomm.replicate`). With
      one fragment, no overlap and no mixing it is :func:`diloco`.

    Raises:
      ValueError: If a number is out of range or an optimizer no optax transformation; in `init`, if
        there are fewer leaves than fragments, or one of them gets none.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import streaming_diloco
      >>> outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
      >>> tx = streaming_diloco(optax.sgd(0.1), outer, 100, fragments=4, overlap=5, mixing=0.5)

    References:
      Douillard et al., `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025. There
      fragments are layers, strided; here they are what `split` says.
    """
    require_transformation(inner, "inner")
    require_transformation(outer, "outer")
    period_of(period)
    if callable(period):
        raise ValueError("`period` must be a Python int: offsets of fragments are parts of it.")
    for name, value, least, most in (
        ("fragments", fragments, 1, period),
        ("overlap", overlap, 0, period - 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(
                f"`{name}` must be a Python int from {least} to {most} where `period` is {period}, "
                f"got {value!r}."
            )
    if not 0 <= mixing < 1:
        raise ValueError(f"`mixing` must be in [0, 1), got {mixing!r}.")
    combine = optax.with_extra_args_support(mean(axis_name) if aggregator is None else aggregator)
    step_outside = optax.with_extra_args_support(outer)
    offsets = [number * period // fragments for number in range(fragments)]

    def parts_of(tree: PyTree, params: PyTree) -> list[list[jax.Array]]:
        numbers = (split or (lambda p: _split_evenly(p, fragments)))(params)
        leaves = jax.tree.leaves(tree)
        if len(numbers) != len(leaves) or set(numbers) != set(range(fragments)):
            raise ValueError(
                f"`split` must give each of the {len(leaves)} leaves a fragment from 0 to "
                f"{fragments - 1}, and each fragment a leaf, got {numbers!r}."
            )
        return [
            [x for x, number in zip(leaves, numbers, strict=True) if number == fragment]
            for fragment in range(fragments)
        ]

    def joined(parts: Sequence[list[jax.Array]], params: PyTree) -> PyTree:
        """The inverse of `parts_of`."""
        structure: Any = jax.tree.structure(params)
        numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
        places: Any = chain(*parts_of(numbered, params))
        by_place = dict(zip(places, chain(*parts), strict=True))
        return jax.tree.unflatten(structure, [by_place[i] for i in sorted(by_place)])

    def init_fn(params: PyTree) -> StreamingState:
        _axis.require_bound(axis_name)
        anchors = jax.tree.map(lambda x: of_the_first(x, axis_name), params)
        states = tuple(
            FragmentState(anchor, combine.init(part), step_outside.init(anchor))
            for anchor, part in zip(
                parts_of(anchors, params), parts_of(params, params), strict=True
            )
        )
        return StreamingState(jnp.zeros((), jnp.int32), states)

    def meet(own: list[jax.Array], state: FragmentState) -> FragmentState:
        moved = jax.tree.map(jnp.subtract, own, state.anchor)
        shared, aggregated = combine.update(moved, state.aggregator, own)
        descent = jax.tree.map(jnp.negative, shared)
        change, outside = step_outside.update(descent, state.outer, state.anchor)
        return FragmentState(optax.apply_updates(state.anchor, change), aggregated, outside)

    def advance(
        step: jax.Array,
        offset: int,
        fragment: FragmentState,
        x: list[jax.Array],
        updates: list[jax.Array],
    ) -> tuple[list[jax.Array], FragmentState]:
        own = jax.tree.map(jnp.add, x, updates)
        meets = (step % period == offset) & (step >= period)
        after = run_when(meets, lambda: meet(own, fragment), lambda _: fragment)
        arrives = (step % period == (offset + overlap) % period) & (step >= period + overlap)
        taken_in = jax.tree.map(lambda y, a: mixing * y + (1 - mixing) * a, own, after.anchor)
        changes = [
            jnp.where(arrives, z - y, u) for z, y, u in zip(taken_in, x, updates, strict=True)
        ]
        return changes, after

    def update_fn(
        updates: PyTree, state: StreamingState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, StreamingState]:
        del extra_args
        if params is None:
            raise ValueError("Local steps need parameters: `tx.update(updates, state, params)`.")
        _axis.require_own(params, axis_name)
        step = state.step + 1
        parts = parts_of(params, params), parts_of(updates, params)
        advanced = [
            advance(step, *each) for each in zip(offsets, state.fragments, *parts, strict=True)
        ]
        changes, fragments_after = zip(*advanced, strict=True)
        return joined(changes, params), StreamingState(step, fragments_after)

    return optax.chain(
        per_worker(inner, axis_name), optax.GradientTransformationExtraArgs(init_fn, update_fn)
    )
