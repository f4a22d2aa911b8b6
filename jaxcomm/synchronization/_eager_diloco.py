"""DiLoCo whose exchanges are one period late, with the worker's own part in time or not."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PerWorker, PyTree
from jaxcomm._require import checked
from jaxcomm._workers import per_worker
from jaxcomm.synchronization._averaging_round import (
    Averaged,
    Averaging,
    How,
    averaging_round,
    displacement,
    first_anchor,
    initial_diagnostics,
    no_steps,
    updates_of,
)
from jaxcomm.synchronization._exchange import Period, aggregator_of, local_steps
from jaxcomm.synchronization._trees import chosen, wide


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


@checked
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
      accepts `weight`, `present` and `flush` as :func:`local_sgd` does; the late mean has the
      weights of its own period. With `eager`, workers are never equal again.

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
    combine = aggregator_of(aggregator, axis_name)

    def init(params: PyTree) -> EagerState:
        anchor, zero = first_anchor(params, axis_name), jnp.zeros((), jnp.int32)
        nothing = jax.tree.map(jnp.zeros_like, anchor)
        return EagerState(
            step=zero,
            since=zero,
            own=_axis.marked(OwnState(anchor, outer.init(anchor), nothing), axis_name),
            aggregator=combine.init(wide(params)),
            done=no_steps(params, axis_name),
            late_done=no_steps(params, axis_name),
            diagnostics=initial_diagnostics(),
        )

    def exchange(
        state: EagerState, params: PyTree, updates: PyTree, how: How
    ) -> tuple[PyTree, EagerState]:
        own: OwnState = _axis.own(state.own, axis_name)
        fresh = displacement(own.anchor, params, updates)

        def mixed(averaged: Averaged) -> PyTree:
            total = jnp.where(averaged.total == 0, 1, averaged.total)
            sent = averaged.weight / total  # The share of this worker in the late mean.

            def part(late_mean: jax.Array, new: jax.Array, late: jax.Array) -> jax.Array:
                change = new / _axis.size(axis_name) - sent.astype(late.dtype) * late
                return late_mean + (change if eager else jnp.zeros_like(change))

            return jax.tree.map(part, averaged.mean, fresh, own.late)

        before = Averaging(
            anchor=own.anchor,
            aggregator=state.aggregator,
            outer=own.outer,
            unsent=state.late_done,
            succeeded=jnp.ones((), bool),
            counts=state.diagnostics,
        )
        after, _ = averaging_round(combine, outer, before, own.late, how, mixed)
        moves = how.participates & after.succeeded
        moved = OwnState(after.anchor, after.outer, fresh)
        return updates_of(after, params, updates, how.participates), state._replace(
            own=_axis.marked(chosen(moves, moved, own), axis_name),
            aggregator=after.aggregator,
            done=chosen(moves, no_steps(params, axis_name), state.done),
            late_done=chosen(moves, state.done, state.late_done),
            diagnostics=after.counts,
        )

    return optax.chain(
        per_worker(inner, axis_name=axis_name), local_steps(init, exchange, period, axis_name)
    )
