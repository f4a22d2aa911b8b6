"""Periodic averages of the workers' displacements, each followed by an outer optimizer step."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._contract import Aggregator, AxisName, PerWorker, PyTree
from jaxcomm._mesh import collective_cond
from jaxcomm._noise import following
from jaxcomm._require import described, flag_of_all, require_axis_name, require_transformation
from jaxcomm.aggregation import mean
from jaxcomm.synchronization._averaging_round import Averaging, averaging_round, updates_of
from jaxcomm.synchronization._trees import wide
from jaxcomm.synchronization._weighted_average import (
    apply_finite_step,
    displacement,
    first_anchor,
    initial_diagnostics,
    no_steps,
    require_params,
    takes_part,
)

Period: TypeAlias = int | Callable[[jax.Array], jax.Array | int]
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


def period_of(period: Period) -> Callable[[jax.Array], jax.Array]:
    """A function from the number of steps so far to the period, int32[]."""
    if callable(period):
        return lambda step: jnp.asarray(period(step), jnp.int32)
    if not isinstance(period, int) or isinstance(period, bool) or period < 1:
        raise ValueError(
            f"`period` must be a Python int of at least 1 or a schedule, got {described(period)}."
        )
    return lambda step: jnp.full((), period, jnp.int32)


def is_due(since: jax.Array, period: jax.Array, flush: jax.Array | bool | None) -> jax.Array:
    """Whether this step ends a period, bool[], because it is over or because of `flush`."""
    over = since >= period
    return over if flush is None else over | flag_of_all(flush, "flush")


def require_aggregator(
    aggregator: optax.GradientTransformation | None, axis_name: AxisName
) -> None:
    """Raises if it is no transformation, or averages over other axes than those of the workers."""
    if aggregator is not None:
        require_transformation(aggregator, "aggregator")
    own = aggregator.axes if isinstance(aggregator, Aggregator) else _axis.names(axis_name)
    if {*own} != {*_axis.names(axis_name)}:
        raise ValueError(
            f"`aggregator` averages over {[*own]}, but the workers of the exchange are "
            f"those of `axis_name`={axis_name!r}: the axes must be the same."
        )


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
    require_axis_name(axis_name)
    period_at = period_of(period)
    require_aggregator(aggregator, axis_name)
    combine = optax.with_extra_args_support(mean(axis_name) if aggregator is None else aggregator)
    outer_tx = optax.with_extra_args_support(outer)

    def init_fn(params: PyTree) -> LocalState:
        _axis.require_bound(axis_name)
        anchor, zero = first_anchor(params, axis_name), jnp.zeros((), jnp.int32)
        return LocalState(
            step=zero,
            since=zero,
            anchor=anchor,
            aggregator=combine.init(wide(params)),
            outer=outer_tx.init(anchor),
            done=no_steps(params, axis_name),
            diagnostics=initial_diagnostics(),
        )

    def update_fn(
        updates: PyTree,
        state: LocalState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        present: jax.Array | None = None,
        flush: jax.Array | bool | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, LocalState]:
        require_params(params, axis_name)
        participates = takes_part(present, axis_name)
        updates, done = apply_finite_step(params, updates, state.done, weight, axis_name)
        local = state._replace(step=following(state.step), since=state.since + 1, done=done)

        def exchange() -> tuple[PyTree, LocalState]:
            before = Averaging(
                anchor=state.anchor,
                aggregator=state.aggregator,
                outer=state.outer,
                unsent=no_steps(params, axis_name),
                succeeded=jnp.ones((), bool),
                counts=state.diagnostics,
            )
            after, _ = averaging_round(
                combine,
                outer_tx,
                before,
                displacement(state.anchor, params, updates),
                done,
                participates=participates,
                weighted=weight is not None,
                axis_name=axis_name,
                extra_args=extra_args,
            )
            return updates_of(after, params, updates, participates), LocalState(
                step=local.step,
                since=jnp.zeros((), jnp.int32),
                anchor=after.anchor,
                aggregator=after.aggregator,
                outer=after.outer,
                done=after.unsent,
                diagnostics=after.counts,
            )

        due = is_due(local.since, period_at(state.step), flush)
        return collective_cond(due, exchange, lambda _: (updates, local))

    return Aggregator(init_fn, update_fn, axis_name, "local")
