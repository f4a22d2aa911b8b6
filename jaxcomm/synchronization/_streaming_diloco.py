"""Streaming DiLoCo: fragments of the parameters are averaged in turn and applied with a delay."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._base import AxisName, PerWorker, PyTree
from jaxcomm._mesh import require_distinct
from jaxcomm._per_worker import per_worker
from jaxcomm._require import require_transformation
from jaxcomm._switch import collective_cond
from jaxcomm.aggregation import mean
from jaxcomm.synchronization._exchange import period_of, require_axes_of
from jaxcomm.synchronization._weighted_average import (
    apply_finite_step,
    displacement,
    first_anchor,
    initial_diagnostics,
    no_steps,
    require_params,
    select_if_finite,
    takes_part,
    updates_to,
    weighted_average,
)
from jaxcomm.synchronization._wide import wide

Fragment: TypeAlias = PyTree
"""The tree of the parameters with `optax.MaskedNode` in place of the leaves of other fragments.

Leaves keep their paths. So an aggregator distinguishes all fragments and finds their specs, and
state is sharded as the parameters.
"""


class FragmentState(NamedTuple):
    """The state of one fragment; equal on all workers except as the aggregator marks."""

    anchor: Fragment  # the global parameters after its last averaging round, in float32 at least
    aggregator: Any
    outer: Any
    done: PerWorker  # each worker's steps since the last averaging round
    succeeded: jax.Array  # bool[], whether its last averaging round succeeded
    counts: dict[
        str, jax.Array
    ]  # float32[], `skipped_steps` before it, and `skipped_exchanges` rounds


class StreamingState(NamedTuple):
    """The state of `streaming_diloco` except the inner optimizer's."""

    step: jax.Array  # int32[], steps so far
    fragments: tuple[FragmentState, ...]
    diagnostics: dict[
        str, jax.Array
    ]  # float32[], `skipped_steps` before the last averaging round, and `skipped_exchanges` rounds


def _split_evenly(params: PyTree, fragments: int) -> list[int]:
    """The fragment of each leaf: consecutive leaves, as equal in size as the order allows."""
    sizes = [x.size for x in jax.tree.leaves(params)]
    if fragments > len(sizes):
        raise ValueError(
            f"`fragments`={fragments} is more than the {len(sizes)} leaves of the parameters."
        )
    assigned: list[int] = []
    before, total = 0, max(sum(sizes), 1)
    for number, size in enumerate(sizes):
        # The position of the leaf's middle, limited so that each fragment gets a leaf.
        wanted = int((before + size / 2) / total * fragments)
        lowest = max(assigned[-1] if assigned else 0, fragments - (len(sizes) - number))
        highest = (assigned[-1] + 1) if assigned else 0
        assigned.append(min(max(wanted, lowest), highest))
        before += size
    return assigned


def _paths(params: PyTree) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def _joined(parts: Sequence[Fragment]) -> PyTree:
    """The tree whose leaves are in one of the fragments each."""

    def present(*nodes: Any) -> Any:
        return next(node for node in nodes if not isinstance(node, optax.MaskedNode))

    masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    return jax.tree.map(present, *parts, is_leaf=masked)


def streaming_diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    period: int,
    *,
    fragments: int,
    overlap: int = 0,
    mixing_factor: float = 0.0,
    aggregator: optax.GradientTransformation | None = None,
    split: Callable[[PyTree], list[int]] | None = None,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""DiLoCo that averages the parameters in fragments, one at a time, and applies them late.

    For fragment :math:`p` of P with the offset :math:`o_p = \lfloor p H / P \rfloor`, after
    the local step number :math:`t`, :math:`x_i \gets x_i + \mathrm{inner}(g_i)`,

    .. math:: t \equiv o_p \;(\mathrm{mod}\; H): \quad &
                  a \gets a + \mathrm{outer}\Big(\frac{1}{n} \sum_i (a - x_i)\Big) \\
              t \equiv o_p + \tau \;(\mathrm{mod}\; H): \quad &
                  x_i \gets \alpha x_i + (1 - \alpha)\, a

    Both lines hold from the H-th step on. A step sends at most one fragment. The peak load of a
    link therefore falls by the factor P, and the average load equals that of :func:`diloco`.
    Results may be applied :math:`\tau` steps late. The program of a step waits for the result of
    the fragment that it sends, unless the runtime overlaps steps.

    Args:
      inner: Any optax optimizer, applied separately on each worker.
      outer: Any optax optimizer, applied to the mean displacement. Each fragment has its own state.
      period: H, an int of at least 1.
      fragments: P, at most the number of leaves and at most H.
      overlap: :math:`\tau`, the number of steps between an averaging round and the use of its
        result, below H.
      mixing_factor: :math:`\alpha` in [0, 1), the weight of a worker's own parameters.
      aggregator: Computes the mean, and determines the messages. Default: the exact mean.
      split: A function from the parameters to the fragment number of each leaf, in order; for
        example, every P-th layer. Default: consecutive leaves, about equal in size.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      A complete optimizer, for parameters that differ by worker (:func:`jaxcomm.replicate`). With
      one fragment, no overlap and no mixing it is :func:`diloco`. `update(..., weight=w)` and
      `update(..., present=mask)` work as in :func:`local_sgd`. A worker that is absent when a
      fragment arrives does not apply it.

    Raises:
      ValueError: If a number is out of range, or an optimizer is not an optax transformation. In
        `init`, if there are fewer leaves than fragments, or a fragment has no leaf.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import streaming_diloco
      >>> outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
      >>> inner = optax.sgd(0.1)
      >>> tx = streaming_diloco(inner, outer, 100, fragments=4, overlap=5, mixing_factor=0.5)

    References:
      Douillard et al., `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025. In the paper,
      fragments are strided layers; here, `split` defines them.
    """
    require_transformation(inner, "inner")
    require_transformation(outer, "outer")
    period_of(period)
    if callable(period):
        raise ValueError(
            "`period` must be a Python int, because the offsets of fragments are fractions of it."
        )
    for name, value, least, most in (
        ("fragments", fragments, 1, period),
        ("overlap", overlap, 0, period - 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(
                f"`{name}` must be a Python int from {least} to {most} for `period`={period}, "
                f"got {value!r}."
            )
    if not 0 <= mixing_factor < 1:
        raise ValueError(f"`mixing_factor` must be in [0, 1), got {mixing_factor!r}.")
    require_distinct(axis_name)
    require_axes_of(aggregator, axis_name)
    combine = optax.with_extra_args_support(mean(axis_name) if aggregator is None else aggregator)
    outer_tx = optax.with_extra_args_support(outer)
    offsets = [number * period // fragments for number in range(fragments)]

    def parts_of(tree: PyTree, params: PyTree) -> list[Fragment]:
        numbers = (split or (lambda p: _split_evenly(p, fragments)))(params)
        paths = _paths(params)
        if len(numbers) != len(paths) or set(numbers) != set(range(fragments)):
            raise ValueError(
                f"`split` must give each of the {len(paths)} leaves a fragment from 0 to "
                f"{fragments - 1}, and each fragment a leaf, got {numbers!r}."
            )
        leaves, treedef = jax.tree.flatten(tree)

        def part(fragment: int) -> Fragment:
            own = [
                x if number == fragment else optax.MaskedNode()
                for x, number in zip(leaves, numbers, strict=True)
            ]
            return jax.tree.unflatten(treedef, own)

        return [part(fragment) for fragment in range(fragments)]

    def init_fn(params: PyTree) -> StreamingState:
        _axis.require_bound(axis_name)
        states = tuple(
            FragmentState(
                anchor=(anchor := first_anchor(part, axis_name)),
                aggregator=combine.init(wide(part)),
                outer=outer_tx.init(anchor),
                done=no_steps(axis_name),
                succeeded=jnp.ones((), bool),
                counts=initial_diagnostics(),
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
        participates = takes_part(present, axis_name)
        updates, one = apply_finite_step(params, updates, no_steps(axis_name), weight, axis_name)
        step = state.step + 1

        def exchange(fragment: FragmentState, x: Fragment, u: Fragment) -> FragmentState:
            averaged = weighted_average(
                combine,
                fragment.aggregator,
                fragment.anchor,
                displacement(fragment.anchor, x, u),
                fragment.done,
                participates=participates,
                weighted=weight is not None,
                axis_name=axis_name,
                extra_args=extra_args,
            )
            descent = jax.tree.map(jnp.negative, averaged.mean)
            change, outer_state = outer_tx.update(
                descent, fragment.outer, fragment.anchor, **extra_args
            )
            anchor = optax.apply_updates(fragment.anchor, change)
            averaged_result = FragmentState(
                anchor=anchor,
                aggregator=averaged.aggregator,
                outer=outer_state,
                done=averaged.done,
                succeeded=jnp.ones((), bool),
                counts={
                    **fragment.counts,
                    "skipped_steps": fragment.counts["skipped_steps"] + averaged.skipped_steps,
                },
            )
            local_result = fragment._replace(
                succeeded=jnp.zeros((), bool),
                counts={
                    **fragment.counts,
                    "skipped_exchanges": fragment.counts["skipped_exchanges"] + 1,
                },
            )
            return select_if_finite(averaged, anchor, averaged_result, local_result)

        def advance(
            offset: int, before: FragmentState, x: Fragment, u: Fragment
        ) -> tuple[Fragment, FragmentState]:
            local = before._replace(done=jax.tree.map(jnp.add, before.done, one))
            exchanges = (step % period == offset) & (step >= period)
            after = collective_cond(exchanges, lambda: exchange(local, x, u), lambda _: local)
            arrives = (step % period == (offset + overlap) % period) & (step >= period + overlap)
            local_params = jax.tree.map(jnp.add, wide(x), wide(u))
            mixed = jax.tree.map(
                lambda y, a: mixing_factor * y + (1 - mixing_factor) * a, local_params, after.anchor
            )
            applies = arrives & participates & after.succeeded
            changes = jax.tree.map(lambda a, u: jnp.where(applies, a, u), updates_to(mixed, x), u)
            return changes, after

        parts = parts_of(params, params), parts_of(updates, params)
        advanced = [advance(*each) for each in zip(offsets, state.fragments, *parts, strict=True)]
        changes, after = zip(*advanced, strict=True)
        # Every fragment counts each step, so the total is their maximum, not their sum.
        skipped_steps = jnp.max(jnp.stack([fragment.counts["skipped_steps"] for fragment in after]))
        failed = sum(fragment.counts["skipped_exchanges"] for fragment in after)
        report = {"skipped_steps": skipped_steps, "skipped_exchanges": failed}
        return _joined(changes), StreamingState(step, after, report)

    return optax.chain(
        per_worker(inner, axis_name), optax.GradientTransformationExtraArgs(init_fn, update_fn)
    )
