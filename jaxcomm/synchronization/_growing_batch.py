"""Batches that grow, with the matching proximal point method; learning rates by mini-batches."""

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PyTree
from jaxcomm._noise import following
from jaxcomm._require import AboveZero, Positive, Range, checked, named


@checked
def growing_batch(
    initial: Positive,
    growth: Annotated[float, Range(above=1)],
    maximum: Positive,
    *,
    restart_period: Positive | None = None,
) -> Callable[[jax.Array], jax.Array]:
    r"""A growing number of mini-batches per worker between exchanges.

    .. math:: m_t = \min(\lfloor m_0\, \rho^{\,t \bmod R} \rfloor, M)

    Here :math:`t` is the number of exchanges so far. Pass the result as `finished` to
    :func:`window_gradients`, equal on all workers. Exchanges become rarer as training approaches an
    optimum, where noise dominates.

    Args:
      initial: :math:`m_0`, the number before the first exchange, at least 1.
      growth: :math:`\rho`, above 1.
      maximum: :math:`M`, the number of mini-batches in the batch of :func:`window_gradients`.
      restart_period: :math:`R`, the number of exchanges after which :math:`m_0` is used again.
        Default: never.

    Returns:
      A function from the number of exchanges so far, int32[], to int32[].

    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.synchronization import growing_batch
      >>> print(jax.vmap(growing_batch(2, 1.5, maximum=8))(jnp.arange(6)))
      [2 3 4 6 8 8]

    References:
      Yu, Jin, `On the Computation and Communication Complexity of Parallel SGD with Dynamic Batch
      Sizes <https://arxiv.org/abs/1905.04346>`_, 2019 (CR-PSGD).
    """
    sizes = [min(initial, maximum)]
    while sizes[-1] < maximum:
        sizes.append(min(math.floor(initial * growth ** len(sizes)), maximum))

    def size(exchanges: jax.Array) -> jax.Array:
        since = exchanges if restart_period is None else exchanges % restart_period
        return jnp.asarray(sizes, jnp.int32)[jnp.minimum(since, len(sizes) - 1)]

    return size


class ProximalState(NamedTuple):
    """The state of `proximal_point`, equal on all workers."""

    step: jax.Array  # int32[]
    center: PyTree  # the parameters at the last restart


@checked
def proximal_point(strength: AboveZero, restart_period: Positive) -> optax.GradientTransformation:
    r"""Adds the gradient of a squared distance to the parameters at the last restart.

    .. math:: g \gets g + \theta\, (x - y), \qquad y \gets x \text{ at every } R\text{-th step}

    With batches that grow between the same restarts (:func:`growing_batch`), this is the Catalyst
    form for nonconvex losses. Each stage minimizes
    :math:`f(x) + \tfrac{\theta}{2} \|x - y\|^2`. Nothing is sent.

    Args:
      strength: :math:`\theta`, above 0.
      restart_period: R, at least 1.

    Returns:
      A transformation to place between the aggregator and the optimizer.

    Raises:
      ValueError: If a number is out of range.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxcomm.synchronization import proximal_point
      >>> tx = optax.chain(proximal_point(0.5, restart_period=10), optax.sgd(1.0))
      >>> updates, _ = tx.update(jnp.float32(1), tx.init(jnp.float32(0)), jnp.float32(0))
      >>> print(updates)
      -1.0

    References:
      Yu, Jin, `On the Computation and Communication Complexity of Parallel SGD with Dynamic Batch
      Sizes <https://arxiv.org/abs/1905.04346>`_, 2019 (CR-PSGD-Catalyst).
    """

    def init_fn(params: PyTree) -> ProximalState:
        return ProximalState(jnp.zeros((), jnp.int32), params)

    def update_fn(
        updates: PyTree, state: ProximalState, params: PyTree = None
    ) -> tuple[PyTree, ProximalState]:
        begins = state.step % restart_period == 0
        center = jax.tree.map(lambda y, x: jnp.where(begins, x, y), state.center, params)
        total = jax.tree.map(
            lambda g, x, y: g + (strength * (x - y)).astype(g.dtype), updates, params, center
        )
        return total, ProximalState(following(state.step, restart_period), center)

    return optax.GradientTransformation(init_fn, update_fn)


class FinishedState(NamedTuple):
    """The state of `scale_by_finished`, equal on all workers."""

    finished: jax.Array  # int32[], finished mini-batches of all workers before this step


@named
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
      TypeError: In `update`, if `weight` is missing.
      ValueError: In `update`, if `weight` is not a count.

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
        weight: jax.Array,
        **extra_args: Any,
    ) -> tuple[PyTree, FinishedState]:
        del params, extra_args
        if jnp.asarray(weight).dtype == bool:
            raise ValueError('`weight` counts workers: leave out `average_over="workers"`.')
        local = _axis.as_varying(jnp.asarray(weight, jnp.float32), axis_name)
        with jax.named_scope("count"):
            done = lax.psum(local, axis_name).astype(jnp.int32)
        rate = jnp.asarray(schedule(state.finished))
        scaled = jax.tree.map(lambda u: u * rate.astype(u.dtype), updates)
        return scaled, FinishedState(state.finished + done)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
