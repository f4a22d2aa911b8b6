"""DiLoCo whose exchanges are one period late, with the worker's own part in time or not."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._axis import names_itself
from jaxcomm._contract import Aggregator, AxisName, PerWorker, PyTree
from jaxcomm._mesh import collective_cond
from jaxcomm._noise import following
from jaxcomm._require import require_axis_name, require_transformation
from jaxcomm._workers import per_worker
from jaxcomm.aggregation import mean
from jaxcomm.synchronization._averaging_round import outer_step
from jaxcomm.synchronization._exchange import Period, period_of, require_aggregator
from jaxcomm.synchronization._trees import wide
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


class OwnState(NamedTuple):
    """What differs by worker; stored with a leading axis `[1]`."""

    anchor: PyTree  # the parameters after the last exchange, in float32 at least
    outer: Any
    late: PyTree  # the displacement of the last period, which the next exchange sends


class EagerState(NamedTuple):
    """The state of `eager_diloco` except the inner optimizer's."""

    step: jax.Array  # int32[], steps so far
    since: jax.Array  # int32[], steps since the last exchange
    own: PerWorker
    aggregator: Any
    done: PerWorker  # each worker's steps since the last exchange
    late_done: PerWorker  # and those of the displacement that is late
    diagnostics: dict[str, jax.Array]  # float32[], as of `local_sgd`


@names_itself
def eager_diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    period: Period,
    *,
    aggregator: optax.GradientTransformation | None = None,
    eager: bool = True,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""DiLoCo whose mean displacement is one period late, so that sending it may take a period.

    With the displacement :math:`\Delta_i^t = a_i - x_i` of worker i in period t,

    .. math:: p_i^t = \frac{1}{n} \sum_j \Delta_j^{t - 1}
              + \frac{1}{n} (\Delta_i^t - \Delta_i^{t - 1}), \qquad
              a_i \gets a_i + \mathrm{outer}(p_i^t), \qquad x_i \gets a_i

    Of the mean, the own part is thus of this period. With `eager=False`, the last term is omitted
    (delayed outer gradients), and all :math:`a_i` are equal. :math:`\Delta^0 = 0`: the first
    exchange has no late part.

    An exchange sends the messages of `aggregator`, as :func:`diloco` does. They depend on the state
    only, so a compiler may send them during the whole computation of the step with the exchange.

    Args:
      inner: Any optax optimizer; its state differs by worker.
      outer: Any optax optimizer, such as `optax.sgd(0.7, momentum=0.9, nesterov=True)`. Its state
        differs by worker too.
      period: As for :func:`local_sgd`.
      aggregator: As for :func:`local_sgd`. Its input is the late displacement of each worker.
      eager: Whether the own part of the mean is of this period.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      A complete optimizer, for parameters that differ by worker (:func:`jaxcomm.replicate`). It
      accepts `weight` and `present` as :func:`local_sgd` does; the late mean has the weights of its
      own period. With `eager`, workers are never equal again.

    Raises:
      ValueError: As :func:`diloco` does, or if `eager` is not a bool.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import eager_diloco
      >>> outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
      >>> tx = eager_diloco(optax.sgd(0.1, momentum=0.9), outer, period=50)

    References:
      Kale, Douillard, Donchev, `Eager Updates for Overlapped Communication and Computation in
      DiLoCo <https://arxiv.org/abs/2502.12996>`_, 2025.

    Differs from the paper: the message is sent by the step that needs its result, not during the
    period before it, since a step is one program. If `aggregator` compresses, the own late part
    that is subtracted is the exact one.
    """
    require_transformation(inner, "inner")
    require_transformation(outer, "outer")
    if not isinstance(eager, bool):
        raise ValueError(f"`eager` must be a Python bool, got {eager!r}.")
    require_axis_name(axis_name)
    require_aggregator(aggregator, axis_name)
    combine = optax.with_extra_args_support(mean(axis_name) if aggregator is None else aggregator)
    outer_tx = optax.with_extra_args_support(outer)
    period_at = period_of(period)

    def init_fn(params: PyTree) -> EagerState:
        _axis.require_bound(axis_name)
        anchor, zero = first_anchor(params, axis_name), jnp.zeros((), jnp.int32)
        nothing = jax.tree.map(jnp.zeros_like, anchor)
        return EagerState(
            step=zero,
            since=zero,
            own=_axis.marked(OwnState(anchor, outer_tx.init(anchor), nothing), axis_name),
            aggregator=combine.init(wide(params)),
            done=no_steps(params, axis_name),
            late_done=no_steps(params, axis_name),
            diagnostics=initial_diagnostics(),
        )

    def update_fn(
        updates: PyTree,
        state: EagerState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        present: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, EagerState]:
        require_params(params, axis_name)
        participates = takes_part(present, axis_name)
        updates, done = apply_finite_step(params, updates, state.done, weight, axis_name)
        local = state._replace(step=following(state.step), since=state.since + 1, done=done)
        own: OwnState = _axis.own(state.own, axis_name)

        def exchange() -> tuple[PyTree, EagerState]:
            averaged = weighted_average(
                combine,
                state.aggregator,
                own.anchor,
                own.late,
                state.late_done,
                participates=participates,
                weighted=weight is not None,
                axis_name=axis_name,
                extra_args=extra_args,
            )
            fresh = displacement(own.anchor, params, updates)
            total = jnp.where(averaged.total == 0, 1, averaged.total)
            sent = averaged.weight / total  # The share of this worker in the late mean.

            def part(late_mean: jax.Array, new: jax.Array, late: jax.Array) -> jax.Array:
                change = new / _axis.size(axis_name) - sent.astype(late.dtype) * late
                return late_mean + (change if eager else jnp.zeros_like(change))

            mixed = jax.tree.map(part, averaged.mean, fresh, own.late)
            anchor, outer_state = outer_step(outer_tx, mixed, own.outer, own.anchor, **extra_args)
            new_updates = updates_to(anchor, params)
            after = OwnState(anchor, outer_state, fresh)
            counts = {
                **state.diagnostics,
                "skipped_steps": state.diagnostics["skipped_steps"] + averaged.skipped_steps,
            }
            averaged_result = (
                jax.tree.map(lambda a, u: jnp.where(participates, a, u), new_updates, updates),
                _axis.marked(
                    jax.tree.map(lambda a, b: jnp.where(participates, a, b), after, own), axis_name
                ),
                averaged.aggregator,
                jax.tree.map(lambda a, b: jnp.where(participates, a, b), done, state.late_done),
                jax.tree.map(
                    lambda a, b: jnp.where(participates, a, b), no_steps(params, axis_name), done
                ),
                counts,
            )
            failed = {
                **state.diagnostics,
                "skipped_exchanges": state.diagnostics["skipped_exchanges"] + 1,
            }
            local_result = (
                updates,
                state.own,
                state.aggregator,
                state.late_done,
                done,
                failed,
            )
            # The mean is equal on all workers, and so is whether it is finite.
            chosen = select_if_finite(averaged, averaged.mean, averaged_result, local_result)
            new_updates, kept, aggregated, late_done, since_then, counts = chosen
            return new_updates, EagerState(
                step=local.step,
                since=jnp.zeros((), jnp.int32),
                own=kept,
                aggregator=aggregated,
                done=since_then,
                late_done=late_done,
                diagnostics=counts,
            )

        due = local.since >= period_at(state.step)
        return collective_cond(due, exchange, lambda _: (updates, local))

    return optax.chain(
        per_worker(inner, axis_name=axis_name), Aggregator(init_fn, update_fn, axis_name, "local")
    )
