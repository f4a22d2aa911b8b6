"""Local steps with momentum, of which the momentum is averaged too."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm._base import AxisName, PerWorker, PyTree
from jaxcomm._per_worker import per_worker
from jaxcomm._switch import collective_cond
from jaxcomm.aggregation import mean
from jaxcomm.synchronization._exchange import Period, period_of
from jaxcomm.synchronization._require import require_transformation
from jaxcomm.synchronization._weighted_average import (
    Met,
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
from jaxcomm.synchronization._wide import narrow, wide


class PrSgdState(NamedTuple):
    """The state of `pr_sgd`, equal on all workers but for the optimizer's."""

    step: jax.Array  # int32[], steps so far
    since: jax.Array  # int32[], since the last exchange
    optimizer: PerWorker
    anchor: PyTree  # the parameters after the last exchange, in float32 at least
    done: PerWorker  # each worker's steps since
    diagnostics: dict[
        str, jax.Array
    ]  # float32[], steps left out before the last exchange; and failed ones


def pr_sgd(
    optimizer: optax.GradientTransformation, period: Period, *, axis_name: AxisName = "data"
) -> optax.GradientTransformationExtraArgs:
    r"""Parallel restarted SGD: workers step by themselves, then average parameters *and* momentum.

    .. math:: u_i \gets \beta u_i + g_i, \quad x_i \gets x_i - \gamma u_i,
              \qquad\text{and at every } H \text{-th step}\quad
              x_i \gets \frac{1}{n} \sum_j x_j, \quad u_i \gets \frac{1}{n} \sum_j u_j

    Sends a float32 all-reduce of the parameters, of the floats of the optimizer's state and of
    three numbers in those steps, and nothing in others. What is sent of parameters is how far they
    have moved. Steps that are not finite are left out, and 16 bits averaged, as :func:`local_sgd`
    does.

    Args:
      optimizer: Any optax optimizer; its floats are averaged, whatever they are.
      period: H, an int of at least 1, or a schedule: a function of the steps taken, int32[].
      axis_name: The mesh axis, or axes, that number the workers.

    Returns:
      A whole transformation, on parameters that differ by worker (:func:`jaxcomm.replicate`). With
      a period of 1 and a linear optimizer, such as momentum SGD, it is that optimizer on the mean
      gradient. `update(..., weight=w)` and `update(..., present=mask)` are those of
      :func:`local_sgd`, for the momentum too.

    Raises:
      ValueError: If `period` is no positive int or schedule, or `optimizer` no optax
        transformation; in `update`, as :func:`local_sgd` does.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import pr_sgd
      >>> tx = pr_sgd(optax.sgd(0.1, momentum=0.9), period=8)

    References:
      Yu, Jin, Yang, `On the Linear Speedup Analysis of Communication Efficient Momentum SGD
      <https://arxiv.org/abs/1905.03817>`_, 2019.
    """
    require_transformation(optimizer, "optimizer")
    own, period_at = per_worker(optimizer, axis_name), period_of(period)
    exact = optax.with_extra_args_support(mean(axis_name))

    def averaged(optimizer: PerWorker, met: Met, here: jax.Array) -> PerWorker:
        """Its floats, of all who were counted; as they are where nobody was."""
        leaves, treedef = jax.tree.flatten(optimizer)
        floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        means, _ = exact.update(wide(floats), optax.EmptyState(), weight=met.weight)
        some = here & (met.total > 0)
        found = iter(
            jnp.where(some, new, old)
            for new, old in zip(narrow(means, floats), floats, strict=True)
        )
        return jax.tree.unflatten(
            treedef,
            [next(found) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in leaves],
        )

    def init_fn(params: PyTree) -> PrSgdState:
        zero = jnp.zeros((), jnp.int32)
        return PrSgdState(
            step=zero,
            since=zero,
            optimizer=own.init(params),
            anchor=first_anchor(params, axis_name),
            done=no_steps(axis_name),
            diagnostics=initial_diagnostics(),
        )

    def update_fn(
        updates: PyTree,
        state: PrSgdState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        present: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, PrSgdState]:
        require_params(params, axis_name)
        here = is_here(present, axis_name)
        extra = extra_args if weight is None else {**extra_args, "weight": weight}
        updates, optimizer = own.update(updates, state.optimizer, params, **extra)
        updates, done = take_step(params, updates, state.done, weight, axis_name)
        local = state._replace(
            step=state.step + 1, since=state.since + 1, optimizer=optimizer, done=done
        )

        def exchange() -> tuple[PyTree, PrSgdState]:
            met = meet(
                exact,
                optax.EmptyState(),
                state.anchor,
                moved_from(state.anchor, params, updates),
                done,
                here=here,
                weighted=weight is not None,
                axis_name=axis_name,
                extra_args={},
            )
            anchor = optax.apply_updates(state.anchor, met.mean)
            onward = jax.tree.map(
                lambda a, u: jnp.where(here, a, u), way_to(anchor, params), updates
            )
            together = (
                onward,
                PrSgdState(
                    step=local.step,
                    since=jnp.zeros((), jnp.int32),
                    optimizer=averaged(optimizer, met, here),
                    anchor=anchor,
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
