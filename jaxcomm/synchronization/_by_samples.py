"""Learning rates that follow what was finished, and not the number of steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import AxisName, PyTree


class FinishedState(NamedTuple):
    """The state of `scale_by_finished`, equal on all workers."""

    finished: jax.Array  # int32[], mini-batches of all workers before this step


def scale_by_finished(
    schedule: Callable[[jax.Array], jax.Array | float], *, axis_name: AxisName = "data"
) -> optax.GradientTransformationExtraArgs:
    r"""Scales updates by a schedule of the mini-batches that all workers have finished.

    .. math:: \Delta \gets \eta(s)\, \Delta, \qquad s \gets s + \sum_i m_i

    Windows differ in how much is finished in them, so that a schedule of windows would lower the
    rate the sooner, the less was done. Sends one float32 in an all-reduce.

    Args:
      schedule: :math:`\eta`, from int32[] mini-batches to a number, such as those of optax. It
        scales: put `optax.sgd(1.0)` beside it, which has the sign.
      axis_name: The mesh axis, or axes, that number the workers.

    Returns:
      A transformation for steps with :func:`window_gradients`, whose count reaches it as `weight`.

    Raises:
      ValueError: In `update`, without a weight, or with one that is no count.

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
                "`scale_by_finished` counts what workers have finished: use "
                "`make_step(..., gradients=window_gradients)`, or pass `weight`."
            )
        if jnp.asarray(weight).dtype == bool:
            raise ValueError(
                "`scale_by_finished` counts mini-batches, and these weights are of workers that "
                'count alike: use `window_gradients` without `average_over="workers"`.'
            )
        own = _axis.as_varying(jnp.asarray(weight, jnp.float32), axis_name)
        done = lax.psum(own, axis_name).astype(jnp.int32)
        rate = jnp.asarray(schedule(state.finished))
        scaled = jax.tree.map(lambda u: u * rate.astype(u.dtype), updates)
        return scaled, FinishedState(state.finished + done)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
