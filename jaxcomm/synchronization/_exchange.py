"""Steps of workers on their own, and exchanges that average their displacements every period."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._contract import Aggregator, AxisName, PerWorker, PyTree
from jaxcomm._mesh import collective_cond
from jaxcomm._noise import following
from jaxcomm._require import Positive, checked
from jaxcomm.aggregation import mean
from jaxcomm.synchronization._averaging_round import (
    Averaged,
    Averaging,
    How,
    apply_finite_step,
    averaging_round,
    displacement,
    first_anchor,
    initial_diagnostics,
    mean_of_floats,
    no_steps,
    require_params,
    takes_part,
    updates_of,
)
from jaxcomm.synchronization._trees import chosen, wide

Period: TypeAlias = Positive | Callable[[jax.Array], jax.Array | int]
"""The number of steps between exchanges; or a function of the number of steps so far, int32[]."""


class LocalState(NamedTuple):
    """The state of periodic averaging; equal on all workers except as the aggregator marks."""

    step: jax.Array  # int32[], steps so far
    since: jax.Array  # int32[], steps since the last exchange
    anchor: PyTree  # the parameters after the last exchange, in float32 at least
    aggregator: Any
    outer: Any
    done: PerWorker  # each worker's steps since the last exchange
    diagnostics: dict[
        str, jax.Array
    ]  # float32[], `skipped_steps` before the last exchange, and `skipped_exchanges` exchanges
    optimizer: Any = ()  # of `pr_sgd`, which averages it too


def aggregator_of(
    aggregator: optax.GradientTransformation | None, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
    """The aggregator of an exchange, by default the exact mean.

    Raises:
      ValueError: If it averages over other axes than those of the workers.
    """
    own = aggregator.axes if isinstance(aggregator, Aggregator) else _axis.names(axis_name)
    if {*own} != {*_axis.names(axis_name)}:
        raise ValueError(f"`aggregator` averages over {[*own]}, not `axis_name`={axis_name!r}.")
    return optax.with_extra_args_support(mean(axis_name) if aggregator is None else aggregator)


def local_steps(
    init: Callable[[PyTree], Any],
    exchange: Callable[[Any, PyTree, PyTree, How], tuple[PyTree, Any]],
    period: Period,
    axis_name: AxisName,
    inner: optax.GradientTransformationExtraArgs | None = None,
) -> Aggregator:
    """Steps that send nothing, except for those that end a period.

    Args:
      init: `params -> state`, with the fields `step`, `since` and `done` of `LocalState`.
      exchange: `(state, params, updates, how) -> (updates, state)`, the exchange after a step.
      period: The steps between exchanges.
      axis_name: The mesh axis, or axes, of the workers.
      inner: An optimizer of each worker whose state is in the field `optimizer`, if not before.
    """

    def update_fn(
        updates: PyTree,
        state: Any,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        present: jax.Array | None = None,
        flush: jax.Array | bool | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, Any]:
        require_params(params, axis_name)
        how = How(takes_part(present, axis_name), weight is not None, axis_name, extra_args)
        now = period(state.step) if callable(period) else period
        due = state.since + 1 >= jnp.asarray(now, jnp.int32)
        if flush is not None:
            due |= jnp.asarray(flush)
        if inner is not None:
            extra = extra_args if weight is None else {**extra_args, "weight": weight}
            updates, optimizer = inner.update(updates, state.optimizer, params, **extra)
            state = state._replace(optimizer=optimizer)
        updates, done = apply_finite_step(params, updates, state.done, weight, axis_name)
        local = state._replace(step=following(state.step), since=state.since + 1, done=done)

        def exchanged() -> tuple[PyTree, Any]:
            changes, after = exchange(local, params, updates, how)
            return changes, after._replace(since=jnp.zeros((), jnp.int32))

        return collective_cond(due, exchanged, lambda _: (updates, local))

    return Aggregator(init, update_fn, axis_name, "local")


@checked
def average_every(
    period: Period,
    outer: optax.GradientTransformation,
    *,
    aggregator: optax.GradientTransformation | None = None,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""Averages the displacements of workers every `period` steps; applies `outer` to the mean.

    .. math:: a \gets a + \mathrm{outer}\Big(\frac{1}{n} \sum_i (a - x_i)\Big), \qquad x_i \gets a

    It handles weights, absent workers, skipped steps and failed exchanges. Workers send nothing
    between exchanges, and in one what the aggregator sends.

    Args:
      period: The number of steps between exchanges, an int or a schedule `step -> int`.
      outer: The outer optimizer, whose gradient is the negative mean displacement.
      aggregator: Forms the mean. Default: the exact one.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      A transformation to place after the optimizer, for parameters that differ by worker.

    Raises:
      ValueError: If `period` is out of range, or `aggregator` averages over other axes.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import average_every
      >>> tx = optax.chain(optax.sgd(0.5), average_every(2, optax.sgd(1.0)))
    """
    return averaged_every(period, outer, aggregator, axis_name)


def averaged_every(
    period: Period,
    outer: optax.GradientTransformation,
    aggregator: optax.GradientTransformation | None,
    axis_name: AxisName,
    inner: optax.GradientTransformationExtraArgs | None = None,
) -> Aggregator:
    """`average_every`; with `inner`, an optimizer of each worker whose floats are averaged too."""
    combine = aggregator_of(aggregator, axis_name)

    def init(params: PyTree) -> LocalState:
        anchor, zero = first_anchor(params, axis_name), jnp.zeros((), jnp.int32)
        return LocalState(
            step=zero,
            since=zero,
            anchor=anchor,
            aggregator=combine.init(wide(params)),
            outer=outer.init(anchor),
            done=no_steps(params, axis_name),
            diagnostics=initial_diagnostics(),
            optimizer=() if inner is None else inner.init(params),
        )

    def average(optimizer: PyTree, averaged: Averaged, participates: jax.Array) -> PyTree:
        leaves, treedef = jax.tree.flatten(optimizer)
        floats = {i: x for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)}
        means, _ = mean_of_floats(combine, floats, averaged.weight, averaged.total, participates)
        return jax.tree.unflatten(treedef, [means.get(i, x) for i, x in enumerate(leaves)])

    def exchange(
        state: LocalState, params: PyTree, updates: PyTree, how: How
    ) -> tuple[PyTree, LocalState]:
        before = Averaging(
            anchor=state.anchor,
            aggregator=state.aggregator,
            outer=state.outer,
            unsent=state.done,
            succeeded=jnp.ones((), bool),
            counts=state.diagnostics,
        )
        moved = displacement(state.anchor, params, updates)
        after, averaged = averaging_round(combine, outer, before, moved, how)
        optimizer = state.optimizer
        if inner is not None:
            means = average(optimizer, averaged, how.participates)
            optimizer = chosen(after.succeeded, means, optimizer)
        return updates_of(after, params, updates, how.participates), state._replace(
            anchor=after.anchor,
            aggregator=after.aggregator,
            outer=after.outer,
            done=after.unsent,
            diagnostics=after.counts,
            optimizer=optimizer,
        )

    return local_steps(init, exchange, period, axis_name, inner)
