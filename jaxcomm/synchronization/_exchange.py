"""Every so many steps, the mean of what workers have moved, and a step of an optimizer with it."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._base import AxisName, PerWorker, PyTree
from jaxcomm._switch import collective_cond
from jaxcomm.aggregation import mean
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

Period: TypeAlias = int | Callable[[jax.Array], jax.Array | int]
"""Steps from one exchange to the next; or a function of the steps taken, int32[]."""


class LocalState(NamedTuple):
    """The state between exchanges, equal on all workers but for what the aggregator marks."""

    step: jax.Array  # int32[], steps so far
    since: jax.Array  # int32[], since the last exchange
    anchor: PyTree  # the parameters after the last exchange, in float32 at least
    aggregator: Any
    outer: Any
    done: PerWorker  # each worker's steps since
    diagnostics: dict[
        str, jax.Array
    ]  # float32[], steps left out before the last exchange; and failed ones


def period_of(period: Period) -> Callable[[jax.Array], jax.Array]:
    """From the steps taken to the period, int32[]."""
    if callable(period):
        return lambda step: jnp.asarray(period(step), jnp.int32)
    if not isinstance(period, int) or isinstance(period, bool) or period < 1:
        raise ValueError(
            f"`period` must be a Python int of at least 1 or a schedule, got {period!r}."
        )
    return lambda step: jnp.full((), period, jnp.int32)


def meets_every(
    period: Period,
    outer: optax.GradientTransformation,
    aggregator: optax.GradientTransformation | None,
    axis_name: AxisName,
) -> optax.GradientTransformationExtraArgs:
    """Every so many steps the mean of what workers have moved, and a step of `outer` with it."""
    combine = optax.with_extra_args_support(mean(axis_name) if aggregator is None else aggregator)
    step_outside = optax.with_extra_args_support(outer)
    period_at = period_of(period)

    def init_fn(params: PyTree) -> LocalState:
        _axis.require_bound(axis_name)
        anchor, zero = first_anchor(params, axis_name), jnp.zeros((), jnp.int32)
        return LocalState(
            step=zero,
            since=zero,
            anchor=anchor,
            aggregator=combine.init(wide(params)),
            outer=step_outside.init(anchor),
            done=no_steps(axis_name),
            diagnostics=initial_diagnostics(),
        )

    def update_fn(
        updates: PyTree,
        state: LocalState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        present: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, LocalState]:
        require_params(params, axis_name)
        here = is_here(present, axis_name)
        updates, done = take_step(params, updates, state.done, weight, axis_name)
        local = state._replace(step=state.step + 1, since=state.since + 1, done=done)

        def exchange() -> tuple[PyTree, LocalState]:
            met = meet(
                combine,
                state.aggregator,
                state.anchor,
                moved_from(state.anchor, params, updates),
                done,
                here=here,
                weighted=weight is not None,
                axis_name=axis_name,
                extra_args=extra_args,
            )
            descent = jax.tree.map(jnp.negative, met.mean)
            change, outside = step_outside.update(descent, state.outer, state.anchor, **extra_args)
            anchor = optax.apply_updates(state.anchor, change)
            onward = jax.tree.map(
                lambda a, u: jnp.where(here, a, u), way_to(anchor, params), updates
            )
            together = (
                onward,
                LocalState(
                    step=local.step,
                    since=jnp.zeros((), jnp.int32),
                    anchor=anchor,
                    aggregator=met.aggregator,
                    outer=outside,
                    done=met.done,
                    diagnostics={
                        **state.diagnostics,
                        "skipped_steps": state.diagnostics["skipped_steps"] + met.skipped_steps,
                    },
                ),
            )
            alone = (
                updates,
                local._replace(
                    since=jnp.zeros((), jnp.int32),
                    diagnostics={**state.diagnostics, "failed": state.diagnostics["failed"] + 1},
                ),
            )
            return where_met(met, anchor, together, alone)

        due = local.since >= period_at(state.step)
        return collective_cond(due, exchange, lambda _: (updates, local))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
