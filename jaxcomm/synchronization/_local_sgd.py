"""Workers that step by themselves and average now and then: local SGD."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxcomm._base import AxisName
from jaxcomm.synchronization._exchange import Period, meets_every, period_of
from jaxcomm.synchronization._require import require_int


def local_sgd(
    period: Period,
    aggregator: optax.GradientTransformation | None = None,
    *,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""Workers step by themselves, and average every so many steps.

    .. math:: x_i \gets x_i + \Delta_i, \qquad\text{and at every } H \text{-th step}\quad
              a \gets a + \frac{1}{n} \sum_i (x_i - a), \quad x_i \gets a

    with :math:`a` the parameters after the last exchange, from which `aggregator` sends how far
    workers have moved: any aggregator will do, compressed or with feedback. Between exchanges
    nothing is sent, and two float32 at them besides what the aggregator does. Optax adds updates,
    so that workers agree but for the rounding of that one sum; :math:`a`, from which the next
    exchange counts, is the same on all bit for bit. It is of float32 at least: parameters of 16
    bits are its roundings, so that what is less than one of theirs adds up over exchanges.

    A step that would not be finite, of a NaN batch, is left out by its worker alone, which adds its
    other steps to the mean and takes it like all. The state's field `diagnostics` counts such
    steps, as `skipped_steps`, at each exchange. An exchange whose mean is not finite, where a
    codec found no room, is counted as `failed`, and workers go on by themselves to the next with
    all that they have moved. Parameters that are not finite at the start stay so, since optax adds
    updates.

    Args:
      period: H, an int of at least 1, or a schedule: a function of the steps taken, int32[].
      aggregator: Forms the mean. Default: the exact one.
      axis_name: The mesh axis, or axes, that number the workers.

    Returns:
      A transformation to place *after* the optimizer, on parameters that differ by worker
      (:func:`jaxcomm.replicate`). An optimizer that keeps state is marked with
      :func:`jaxcomm.per_worker`; its state stays each worker's own. `update(..., weight=w)`, at
      every step or at none, makes the mean one weighted by the sum of a worker's weights since the
      last exchange, and a step of weight 0 is not taken; so counts of windows weigh.
      `update(..., present=mask)`, a bool a worker that all know, takes workers out of an exchange:
      they add nothing to it, go on by themselves, and are averaged as they are at the next.

    Raises:
      ValueError: If `period` is no positive int or schedule; in `update`, if parameters do not
        differ by worker, `weight` is no scalar, or `present` not one bool a worker.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> from jaxcomm.synchronization import local_sgd
      >>> tx = optax.chain(optax.sgd(0.5), local_sgd(period=2))
      >>> params = jaxcomm.replicate(jnp.float32(0), 2)
      >>> state = jaxcomm.init(tx, params, 2)
      >>> step = jaxcomm.simulate(lambda w, x: jnp.mean((w - x) ** 2), tx, 2)
      >>> for _ in range(2):
      ...     params, state, _ = step(params, state, jnp.array([1.0, 3.0]))
      ...     print(params.per_worker["data"])
      [1. 3.]
      [2. 2.]

    References:
      Stich, `Local SGD Converges Fast and Communicates Little <https://arxiv.org/abs/1805.09767>`_,
      2018. Lin et al., `Don't Use Large Mini-Batches, Use Local SGD
      <https://arxiv.org/abs/1808.07217>`_, 2018.
    """
    return meets_every(period, optax.sgd(1.0), aggregator, axis_name)


def post_local(start: int, period: int) -> Callable[[jax.Array], jax.Array]:
    """The schedule of post-local SGD: an exchange in every step at first, and then every so many.

    Args:
      start: Steps before local ones begin, at least 0.
      period: Steps from one exchange to the next from then on.

    Returns:
      A `period` for :func:`local_sgd`.

    Raises:
      ValueError: If `start` is negative or `period` no positive int.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import post_local
      >>> print(post_local(start=2, period=4)(jnp.arange(4)))
      [1 1 4 4]
    """
    period_of(period)
    require_int(start, "start", least=0)
    return lambda step: jnp.where(step < start, 1, period)
