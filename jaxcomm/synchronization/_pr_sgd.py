"""Local steps with momentum, of which the momentum is averaged too."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import AxisName, PerWorker, PyTree
from jaxcomm._per_worker import per_worker
from jaxcomm._when import run_when
from jaxcomm.synchronization._local_sgd import Period, period_of
from jaxcomm.synchronization._require import require_transformation


class PrSgdState(NamedTuple):
    """The state of `pr_sgd`, equal on all workers but for the optimizer's."""

    step: jax.Array  # int32[], steps so far
    since: jax.Array  # int32[], since the last exchange
    optimizer: PerWorker


def pr_sgd(
    optimizer: optax.GradientTransformation, period: Period, *, axis_name: AxisName = "data"
) -> optax.GradientTransformationExtraArgs:
    r"""Parallel restarted SGD: workers step by themselves, then average parameters *and* momentum.

    .. math:: u_i \gets \beta u_i + g_i, \quad x_i \gets x_i - \gamma u_i,
              \qquad\text{and at every } H \text{-th step}\quad
              x_i \gets \frac{1}{n} \sum_j x_j, \quad u_i \gets \frac{1}{n} \sum_j u_j

    Sends a float32 all-reduce of the parameters and of the floats of the optimizer's state in those
    steps, and nothing in others.

    Args:
      optimizer: Any optax optimizer; its floats are averaged, whatever they are.
      period: H, an int of at least 1, or a schedule: a function of the steps taken, int32[].
      axis_name: The mesh axis, or axes, that number the workers.

    Returns:
      A whole transformation, on parameters that differ by worker (:func:`jaxcomm.replicate`). With
      a period of 1 and a linear optimizer, such as momentum SGD, it is that optimizer on the mean
      gradient.

    Raises:
      ValueError: If `period` is no positive int or schedule, or `optimizer` no optax
        transformation; in `update`, if parameters do not differ by worker.

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

    def average(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        mean = lax.pmean(x.astype(jnp.float32), _axis.names(axis_name))
        return _axis.as_varying(mean, axis_name).astype(x.dtype)

    def init_fn(params: PyTree) -> PrSgdState:
        zero = jnp.zeros((), jnp.int32)
        return PrSgdState(zero, zero, own.init(params))

    def update_fn(
        updates: PyTree, state: PrSgdState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PrSgdState]:
        if params is None:
            raise ValueError("Local steps need parameters: `tx.update(updates, state, params)`.")
        _axis.require_own(params, axis_name)
        updates, optimizer = own.update(updates, state.optimizer, params, **extra_args)
        step, since = state.step + 1, state.since + 1

        def meet() -> tuple[PyTree, PrSgdState]:
            onward = jax.tree.map(lambda x, u: average(x + u) - x, params, updates)
            zero = jnp.zeros((), jnp.int32)
            return onward, PrSgdState(step, zero, jax.tree.map(average, optimizer))

        alone = updates, PrSgdState(step, since, optimizer)
        return run_when(since >= period_at(state.step), meet, lambda _: alone)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
