"""DiLoCo in parts: each fragment of the parameters meets at its own time, and arrives late."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._base import AxisName, PerWorker, PyTree
from jaxcomm._per_worker import per_worker
from jaxcomm._switch import collective_cond
from jaxcomm.aggregation import mean
from jaxcomm.synchronization._exchange import period_of
from jaxcomm.synchronization._require import require_transformation
from jaxcomm.synchronization._weighted_average import (
    first_anchor,
    initial_diagnostics,
    is_here,
    meet,
    moved_from,
    no_steps,
    require_params,
    take_step,
    way_to,
    where_met,
)
from jaxcomm.synchronization._wide import wide

Fragment: TypeAlias = dict[str, jax.Array]
"""Leaves by their paths in the parameters, so that no two fragments are alike to an aggregator."""


class FragmentState(NamedTuple):
    """Of one fragment, equal on all workers but for what the aggregator marks."""

    anchor: Fragment  # the global parameters after its last meeting, in float32 at least
    aggregator: Any
    outer: Any
    done: PerWorker  # each worker's steps since
    came_off: jax.Array  # bool[], whether its last meeting did
    told: dict[str, jax.Array]  # float32[], steps left out before it; and failed meetings


class StreamingState(NamedTuple):
    """The state of the meetings of `streaming_diloco`."""

    step: jax.Array  # int32[], steps so far
    fragments: tuple[FragmentState, ...]
    diagnostics: dict[
        str, jax.Array
    ]  # float32[], steps left out before the last meeting; and failed ones


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


def _with_paths(params: PyTree) -> list[tuple[Any, jax.Array]]:
    return jax.tree_util.tree_leaves_with_path(params)


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
      one fragment, no overlap and no mixing it is :func:`diloco`. `update(..., weight=w)` and
      `update(..., present=mask)` are those of :func:`local_sgd`; who is absent as a fragment
      arrives does not take it in.

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

    def parts_of(tree: PyTree, params: PyTree) -> list[Fragment]:
        numbers = (split or (lambda p: _split_evenly(p, fragments)))(params)
        paths = [jax.tree_util.keystr(path) for path, _ in _with_paths(params)]
        if len(numbers) != len(paths) or set(numbers) != set(range(fragments)):
            raise ValueError(
                f"`split` must give each of the {len(paths)} leaves a fragment from 0 to "
                f"{fragments - 1}, and each fragment a leaf, got {numbers!r}."
            )
        each = [*zip(paths, jax.tree.leaves(tree), numbers, strict=True)]
        return [
            {path: x for path, x, number in each if number == fragment}
            for fragment in range(fragments)
        ]

    def joined(parts: Sequence[Fragment], params: PyTree) -> PyTree:
        """The inverse of `parts_of`."""
        by_path = {path: x for part in parts for path, x in part.items()}
        leaves = [by_path[jax.tree_util.keystr(path)] for path, _ in _with_paths(params)]
        return jax.tree.unflatten(jax.tree.structure(params), leaves)

    def init_fn(params: PyTree) -> StreamingState:
        _axis.require_bound(axis_name)
        states = tuple(
            FragmentState(
                anchor=(anchor := first_anchor(part, axis_name)),
                aggregator=combine.init(wide(part)),
                outer=step_outside.init(anchor),
                done=no_steps(axis_name),
                came_off=jnp.ones((), bool),
                told=initial_diagnostics(),
            )
            for part in parts_of(params, params)
        )
        return StreamingState(jnp.zeros((), jnp.int32), states, initial_diagnostics())

    def update_fn(
        updates: PyTree,
        state: StreamingState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        present: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, StreamingState]:
        require_params(params, axis_name)
        here = is_here(present, axis_name)
        updates, one = take_step(params, updates, no_steps(axis_name), weight, axis_name)
        step = state.step + 1

        def exchange(fragment: FragmentState, x: Fragment, u: Fragment) -> FragmentState:
            met = meet(
                combine,
                fragment.aggregator,
                fragment.anchor,
                moved_from(fragment.anchor, x, u),
                fragment.done,
                here=here,
                weighted=weight is not None,
                axis_name=axis_name,
                extra_args=extra_args,
            )
            descent = jax.tree.map(jnp.negative, met.mean)
            change, outside = step_outside.update(
                descent, fragment.outer, fragment.anchor, **extra_args
            )
            anchor = optax.apply_updates(fragment.anchor, change)
            together = FragmentState(
                anchor=anchor,
                aggregator=met.aggregator,
                outer=outside,
                done=met.done,
                came_off=jnp.ones((), bool),
                told={
                    **fragment.told,
                    "skipped_steps": fragment.told["skipped_steps"] + met.skipped_steps,
                },
            )
            alone = fragment._replace(
                came_off=jnp.zeros((), bool),
                told={**fragment.told, "failed": fragment.told["failed"] + 1},
            )
            return where_met(met, anchor, together, alone)

        def advance(
            offset: int, before: FragmentState, x: Fragment, u: Fragment
        ) -> tuple[Fragment, FragmentState]:
            local = before._replace(done=jax.tree.map(jnp.add, before.done, one))
            meets = (step % period == offset) & (step >= period)
            after = collective_cond(meets, lambda: exchange(local, x, u), lambda _: local)
            arrives = (step % period == (offset + overlap) % period) & (step >= period + overlap)
            own = jax.tree.map(jnp.add, wide(x), wide(u))
            taken_in = jax.tree.map(lambda y, a: mixing * y + (1 - mixing) * a, own, after.anchor)
            taken = arrives & here & after.came_off
            changes = jax.tree.map(lambda a, u: jnp.where(taken, a, u), way_to(taken_in, x), u)
            return changes, after

        parts = parts_of(params, params), parts_of(updates, params)
        advanced = [advance(*each) for each in zip(offsets, state.fragments, *parts, strict=True)]
        changes, after = zip(*advanced, strict=True)
        # Each step is in the count of every fragment that has met since.
        skipped_steps = jnp.max(jnp.stack([fragment.told["skipped_steps"] for fragment in after]))
        failed = jnp.sum(jnp.stack([fragment.told["failed"] for fragment in after]))
        told = {"skipped_steps": skipped_steps, "failed": failed}
        return joined(changes, params), StreamingState(step, after, told)

    return optax.chain(
        per_worker(inner, axis_name), optax.GradientTransformationExtraArgs(init_fn, update_fn)
    )
