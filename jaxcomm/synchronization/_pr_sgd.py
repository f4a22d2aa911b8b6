"""Local steps with momentum that average the momentum too."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm._axis import names_itself
from jaxcomm._contract import Aggregator, AxisName, PerWorker, PyTree
from jaxcomm._mesh import collective_cond
from jaxcomm._noise import following
from jaxcomm._require import require_transformation
from jaxcomm._workers import per_worker
from jaxcomm.aggregation import mean
from jaxcomm.synchronization._averaging_round import Averaging, averaging_round, updates_of
from jaxcomm.synchronization._exchange import Period, is_due, period_of
from jaxcomm.synchronization._trees import narrow, wide
from jaxcomm.synchronization._weighted_average import (
    WeightedAverage,
    apply_finite_step,
    displacement,
    first_anchor,
    initial_diagnostics,
    no_steps,
    require_params,
    takes_part,
)


class PrSgdState(NamedTuple):
    """The state of `pr_sgd`; equal on all workers except the optimizer state."""

    step: jax.Array  # int32[], steps so far
    since: jax.Array  # int32[], steps since the last exchange
    optimizer: PerWorker
    anchor: PyTree  # the parameters after the last exchange, in float32 at least
    done: PerWorker  # each worker's steps since the last exchange
    diagnostics: dict[
        str, jax.Array
    ]  # float32[], `skipped_steps` before the last exchange, and `skipped_exchanges` exchanges


@names_itself
def pr_sgd(
    inner: optax.GradientTransformation, period: Period, *, axis_name: AxisName = "data"
) -> optax.GradientTransformationExtraArgs:
    r"""Parallel restarted SGD: local steps, with periodic averages of parameters *and* momentum.

    .. math:: u_i \gets \beta u_i + g_i, \quad x_i \gets x_i - \gamma u_i,
              \qquad\text{and at every } H \text{-th step}\quad
              x_i \gets \frac{1}{n} \sum_j x_j, \quad u_i \gets \frac{1}{n} \sum_j u_j

    Exchange steps send an all-reduce in float32 of the parameters, the floating-point arrays of the
    optimizer's state, and three numbers. Other steps send nothing. For the parameters, workers send
    their displacements. Non-finite steps are skipped, and 16-bit parameters are averaged, as in
    :func:`local_sgd`.

    Args:
      inner: Any optax optimizer. All floating-point arrays of its state are averaged.
      period: H, an int of at least 1, or a schedule: a function of the number of steps so far,
        int32[].
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      A complete optimizer, for parameters that differ by worker (:func:`jaxcomm.replicate`). With a
      period of 1 and a linear optimizer, such as momentum SGD, it equals that optimizer on the mean
      gradient. `update(..., weight=w)`, `update(..., present=mask)` and `update(..., flush=flag)`
      work as in :func:`local_sgd`, and apply to the momentum too.

    Raises:
      ValueError: If `period` is not a positive int or schedule, or `inner` is not an optax
        transformation. In `update`, as :func:`local_sgd` does.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import pr_sgd
      >>> tx = pr_sgd(optax.sgd(0.1, momentum=0.9), period=8)

    References:
      Yu, Jin, Yang, `On the Linear Speedup Analysis of Communication Efficient Momentum SGD
      <https://arxiv.org/abs/1905.03817>`_, 2019.
    """
    require_transformation(inner, "inner")
    local_optimizer, period_at = per_worker(inner, axis_name=axis_name), period_of(period)
    exact = optax.with_extra_args_support(mean(axis_name))
    outer = optax.with_extra_args_support(optax.sgd(1.0))

    def average_state(
        optimizer: PerWorker, averaged: WeightedAverage, participates: jax.Array
    ) -> PerWorker:
        """Averages the floats over the counted workers; keeps them if no worker was counted."""
        leaves, treedef = jax.tree.flatten(optimizer)
        floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        means, _ = exact.update(wide(floats), optax.EmptyState(), weight=averaged.weight)
        replace = participates & (averaged.total > 0)
        new_floats = iter(
            jnp.where(replace, new, old)
            for new, old in zip(narrow(means, floats), floats, strict=True)
        )
        return jax.tree.unflatten(
            treedef,
            [next(new_floats) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in leaves],
        )

    def init_fn(params: PyTree) -> PrSgdState:
        zero = jnp.zeros((), jnp.int32)
        return PrSgdState(
            step=zero,
            since=zero,
            optimizer=local_optimizer.init(params),
            anchor=first_anchor(params, axis_name),
            done=no_steps(params, axis_name),
            diagnostics=initial_diagnostics(),
        )

    def update_fn(
        updates: PyTree,
        state: PrSgdState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        present: jax.Array | None = None,
        flush: jax.Array | bool | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, PrSgdState]:
        require_params(params, axis_name)
        participates = takes_part(present, axis_name)
        extra = extra_args if weight is None else {**extra_args, "weight": weight}
        updates, optimizer = local_optimizer.update(updates, state.optimizer, params, **extra)
        updates, done = apply_finite_step(params, updates, state.done, weight, axis_name)
        local = state._replace(
            step=following(state.step), since=state.since + 1, optimizer=optimizer, done=done
        )

        def exchange() -> tuple[PyTree, PrSgdState]:
            before = Averaging(
                anchor=state.anchor,
                aggregator=optax.EmptyState(),
                outer=outer.init(state.anchor),
                unsent=no_steps(params, axis_name),
                succeeded=jnp.ones((), bool),
                counts=state.diagnostics,
            )
            after, averaged = averaging_round(
                exact,
                outer,
                before,
                displacement(state.anchor, params, updates),
                done,
                participates=participates,
                weighted=weight is not None,
                axis_name=axis_name,
                extra_args={},
            )
            averaged_state = average_state(optimizer, averaged, participates)
            return updates_of(after, params, updates, participates), PrSgdState(
                step=local.step,
                since=jnp.zeros((), jnp.int32),
                optimizer=jax.tree.map(
                    lambda x, y: jnp.where(after.succeeded, x, y), averaged_state, optimizer
                ),
                anchor=after.anchor,
                done=after.unsent,
                diagnostics=after.counts,
            )

        due = is_due(local.since, period_at(state.step), flush)
        return collective_cond(due, exchange, lambda _: (updates, local))

    return Aggregator(init_fn, update_fn, axis_name, "local")
