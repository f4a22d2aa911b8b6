"""Learning rates scheduled by finished mini-batches instead of steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._axis import names_itself
from jaxcomm._contract import AxisName, PyTree


class FinishedState(NamedTuple):
    """The state of `scale_by_finished`, equal on all workers."""

    finished: jax.Array  # int32[], finished mini-batches of all workers before this step


@names_itself
def scale_by_finished(
    schedule: Callable[[jax.Array], jax.Array | float], *, axis_name: AxisName = "data"
) -> optax.GradientTransformationExtraArgs:
    r"""Scales updates by a schedule of the number of mini-batches that all workers have finished.

    .. math:: \Delta \gets \eta(s)\, \Delta, \qquad s \gets s + \sum_i m_i

    Windows differ in their number of finished mini-batches. Schedules indexed by window decay too
    fast when workers finish little. Sends one float32 in an all-reduce.

    Args:
      schedule: :math:`\eta`, a function from int32[] mini-batches to a number, such as an optax
        schedule. It only scales: combine it with `optax.sgd(1.0)`, which sets the sign.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      A transformation for steps with :func:`window_gradients`, which passes its count as `weight`.

    Raises:
      ValueError: In `update`, if `weight` is missing or is not a count.

    Example:
      >>> import jaxcomm, optax
      >>> from jaxcomm.synchronization import scale_by_finished
      >>> schedule = optax.piecewise_constant_schedule(0.4, {10_000: 0.1})
      >>> tx = optax.chain(jaxcomm.mean(), optax.sgd(1.0), scale_by_finished(schedule))
    """

    def init_fn(params: PyTree) -> FinishedState:
        del params
        return FinishedState(jnp.zeros((), jnp.int32))

    def update_fn(
        updates: PyTree,
        state: FinishedState,
        params: PyTree = None,
        *,
        weight: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, FinishedState]:
        del params, extra_args
        if weight is None:
            raise ValueError(
                "`scale_by_finished` needs the number of finished mini-batches: use "
                "`make_step(..., gradients=window_gradients)`, or pass `weight`."
            )
        if jnp.asarray(weight).dtype == bool:
            raise ValueError(
                "`scale_by_finished` counts mini-batches, and these weights are bools that count "
                'workers: use `window_gradients` without `average_over="workers"`.'
            )
        local = _axis.as_varying(jnp.asarray(weight, jnp.float32), axis_name)
        done = lax.psum(local, axis_name).astype(jnp.int32)
        rate = jnp.asarray(schedule(state.finished))
        scaled = jax.tree.map(lambda u: u * rate.astype(u.dtype), updates)
        return scaled, FinishedState(state.finished + done)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
