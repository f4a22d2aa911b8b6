"""Streaming DiLoCo: fragments of the parameters are averaged in turn and applied with a delay."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxcomm._contract import Aggregator, AxisName, PerWorker, PyTree
from jaxcomm._mesh import collective_switch
from jaxcomm._noise import following
from jaxcomm._require import BelowOne, Natural, Positive, checked
from jaxcomm._workers import per_worker
from jaxcomm.synchronization._averaging_round import (
    Averaging,
    How,
    apply_finite_step,
    averaging_round,
    displacement,
    first_anchor,
    initial_diagnostics,
    no_steps,
    require_params,
    takes_part,
    updates_to,
)
from jaxcomm.synchronization._exchange import aggregator_of
from jaxcomm.synchronization._trees import chosen, wide

Fragment: TypeAlias = PyTree
"""The tree of the parameters with `optax.MaskedNode` in place of the leaves of other fragments.

Leaves keep their paths. So an aggregator distinguishes all fragments and finds their specs, and
state is sharded as the parameters.
"""

Split: TypeAlias = Callable[[PyTree], list[int]]
"""A function from the parameters to the fragment number of each leaf, in order."""


class Schedule(NamedTuple):
    """The steps in which fragments are exchanged and arrive; steps are numbered from 1.

    Its methods take a Python int or an int32[].
    """

    period: int
    fragments: int
    overlap: int

    def offset(self, fragment: int) -> int:
        """The remainder, modulo the period, of the steps that exchange the fragment."""
        return fragment * self.period // self.fragments

    def begins(self, fragment: int, step: Any) -> Any:
        """Whether the step begins an exchange of the fragment."""
        return (step % self.period == self.offset(fragment)) & (step >= self.period)

    def arrives(self, fragment: int, step: Any) -> Any:
        """Whether the step applies the result of an exchange of the fragment."""
        return self.begins(fragment, step - self.overlap)

    def is_over(self, fragment: int, step: Any) -> Any:
        """Whether a result of the fragment would have arrived by the step.

        One that is still under way then is of a state with another period or overlap.
        """
        return (step - self.offset(fragment)) % self.period >= self.overlap


class Counted(NamedTuple):
    """What the steps between exchanges change, except parameters and the inner optimizer's."""

    step: jax.Array  # int32[], steps so far
    done: tuple[PerWorker, ...]  # each worker's steps since the last exchange of each fragment


class Streaming(NamedTuple):
    """The parts of `streaming_diloco`, for programs of their own.

    Attributes:
      schedule: When fragments are exchanged, and when they arrive.
      local: The steps between exchanges; its state is `(inner state, Counted)`.
      parts_of: `(tree, params) -> fragments`.
      exchange: `(rounds, displacement, steps, participates) -> rounds` of a fragment, on workers.
      mixed: `(parameters, anchor) -> parameters`, both in float32 at least.
    """

    schedule: Schedule
    local: optax.GradientTransformationExtraArgs
    parts_of: Callable[[PyTree, PyTree], list[Fragment]]
    exchange: Callable[..., Averaging]
    mixed: Callable[[PyTree, PyTree], PyTree]


def _split_evenly(params: PyTree, fragments: int) -> list[int]:
    """The fragment of each leaf: consecutive leaves, as equal in size as the order allows."""
    sizes = [x.size for x in jax.tree.leaves(params)]
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


def parts_of(tree: PyTree, params: PyTree, fragments: int, split: Split | None) -> list[Fragment]:
    """The fragments of a tree like `params`.

    Raises:
      ValueError: If a leaf has no fragment, or a fragment no leaf.
    """
    numbers = split(params) if split else _split_evenly(params, fragments)
    leaves, treedef = jax.tree.flatten(tree)
    if len(numbers) != len(leaves) or set(numbers) != set(range(fragments)):
        raise ValueError(f"Each leaf needs a fragment of {fragments}, and each fragment a leaf.")

    def part(fragment: int) -> Fragment:
        own = [
            x if number == fragment else optax.MaskedNode()
            for x, number in zip(leaves, numbers, strict=True)
        ]
        return jax.tree.unflatten(treedef, own)

    return [part(fragment) for fragment in range(fragments)]


def joined(parts: Sequence[Fragment]) -> PyTree:
    """The tree whose leaves are in one of the fragments each."""

    def present(*nodes: Any) -> Any:
        return next(node for node in nodes if not isinstance(node, optax.MaskedNode))

    masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    return jax.tree.map(present, *parts, is_leaf=masked)


class StreamingState(NamedTuple):
    """The state of `streaming_diloco` except the inner optimizer's."""

    step: jax.Array  # int32[], steps so far
    done: tuple[PerWorker, ...]  # each worker's steps since the last exchange of each fragment
    fragments: tuple[Averaging, ...]
    diagnostics: dict[
        str, jax.Array
    ]  # float32[], `skipped_steps` before the last averaging round, and `skipped_exchanges` rounds


@checked
def streaming_diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    period: Positive,
    *,
    fragments: Positive,
    overlap: Natural = 0,
    mixing_factor: BelowOne = 0.0,
    aggregator: optax.GradientTransformation | None = None,
    split: Split | None = None,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""DiLoCo that averages the parameters in fragments, one at a time, and applies them late.

    For fragment :math:`p` of P with the offset :math:`o_p = \lfloor p H / P \rfloor`, after
    the local step number :math:`t`, :math:`x_i \gets x_i + \mathrm{inner}(g_i)`,

    .. math:: t \equiv o_p \;(\mathrm{mod}\; H): \quad &
                  a \gets a + \mathrm{outer}\Big(\frac{1}{n} \sum_i (a - x_i)\Big) \\
              t \equiv o_p + \tau \;(\mathrm{mod}\; H): \quad &
                  x_i \gets \alpha x_i + (1 - \alpha)\, a

    Both lines hold from the H-th step on. A step sends at most one fragment: a share P / H of the
    steps sends, as :func:`jaxcomm.wire.account` counts. The peak load of a
    link therefore falls by the factor P, and the average load equals that of :func:`diloco`.
    Results may be applied :math:`\tau` steps late. A step of :func:`jaxcomm.make_step` waits for
    the result of the fragment that it sends. One of
    :func:`jaxcomm.training.make_overlapped_step` sends beside the next steps.

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
    if fragments > period or overlap >= period:
        raise ValueError(f"`fragments` must be at most `period`={period}, and `overlap` less.")
    combine = aggregator_of(aggregator, axis_name)
    schedule = Schedule(period, fragments, overlap)

    def fragments_of(tree: PyTree, params: PyTree) -> list[Fragment]:
        return parts_of(tree, params, fragments, split)

    def init_counted(params: PyTree) -> Counted:
        return Counted(jnp.zeros((), jnp.int32), (no_steps(params, axis_name),) * fragments)

    def count(
        updates: PyTree,
        state: Counted,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, Counted]:
        del extra_args
        require_params(params, axis_name)
        updates, one = apply_finite_step(
            params, updates, no_steps(params, axis_name), weight, axis_name
        )
        done = tuple(jax.tree.map(jnp.add, before, one) for before in state.done)
        return updates, Counted(following(state.step, period), done)

    def exchange(
        fragment: Averaging,
        displacements: Fragment,
        done: PerWorker,
        participates: jax.Array,
        weighted: bool = False,
        **extra_args: Any,
    ) -> Averaging:
        before = fragment._replace(unsent=jax.tree.map(jnp.add, fragment.unsent, done))
        how = How(participates, weighted, axis_name, extra_args)
        return averaging_round(combine, outer, before, displacements, how)[0]

    def mixed(params: PyTree, anchor: PyTree) -> PyTree:
        return jax.tree.map(
            lambda y, a: mixing_factor * y + (1 - mixing_factor) * a, params, anchor
        )

    def init_fn(params: PyTree) -> StreamingState:
        counted = init_counted(params)
        states = tuple(
            Averaging(
                anchor=(anchor := first_anchor(part, axis_name)),
                aggregator=combine.init(wide(part)),
                outer=outer.init(anchor),
                unsent=no_steps(params, axis_name),
                succeeded=jnp.zeros((), bool),
                counts=initial_diagnostics(),
            )
            for part in fragments_of(params, params)
        )
        return StreamingState(*counted, states, initial_diagnostics())

    def update_fn(
        updates: PyTree,
        state: StreamingState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        present: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, StreamingState]:
        counted = Counted(state.step, state.done)
        updates, counted = count(updates, counted, params, weight=weight)
        participates = takes_part(present, axis_name)

        parts = [*zip(fragments_of(params, params), fragments_of(updates, params), strict=True)]
        kept = [*zip(state.fragments, counted.done, strict=True)]

        def exchanged(number: int) -> list[tuple[Averaging, PerWorker]]:
            before, done = kept[number]
            displacements = displacement(before.anchor, *parts[number])
            weighted = weight is not None
            after = exchange(before, displacements, done, participates, weighted, **extra_args)
            return [*kept[:number], (after, no_steps(params, axis_name)), *kept[number + 1 :]]

        # The branches of one conditional: a step begins one exchange at most.
        branches = [functools.partial(exchanged, number) for number in range(fragments)]
        begins = [
            schedule.begins(number, counted.step) & ~kept[number][0].succeeded
            for number in range(fragments)
        ]
        which = jnp.argmax(jnp.stack([*begins, jnp.ones((), bool)]))
        after, done = zip(*collective_switch(which, [*branches, lambda: kept]), strict=True)

        def merged(
            number: int, own: Averaging, x: Fragment, u: Fragment
        ) -> tuple[Fragment, Averaging]:
            arrives = schedule.is_over(number, counted.step) & own.succeeded
            local_params = jax.tree.map(jnp.add, wide(x), wide(u))
            steps = updates_to(mixed(local_params, own.anchor), x)
            changes = chosen(arrives & participates, steps, u)
            return changes, own._replace(succeeded=own.succeeded & ~arrives)

        each = [merged(number, after[number], *part) for number, part in enumerate(parts)]
        changes, after = zip(*each, strict=True)
        # Every fragment counts each step, so the total is their maximum, not their sum.
        skipped_steps = jnp.max(jnp.stack([fragment.counts["skipped_steps"] for fragment in after]))
        failed = sum(fragment.counts["skipped_exchanges"] for fragment in after)
        report = {"skipped_steps": skipped_steps, "skipped_exchanges": failed}
        return joined(changes), StreamingState(counted.step, done, after, report)

    local_inner = per_worker(inner, axis_name=axis_name)
    whole = optax.chain(local_inner, Aggregator(init_fn, update_fn, axis_name, "local"))
    local = optax.chain(local_inner, optax.GradientTransformationExtraArgs(init_counted, count))
    parts = Streaming(schedule, local, fragments_of, exchange, mixed)
    return Aggregator(whole.init, whole.update, axis_name, "local", parts=parts)
