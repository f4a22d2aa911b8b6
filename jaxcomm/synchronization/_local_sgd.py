"""Local SGD: workers take local steps and average periodically."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxcomm._axis import names_itself
from jaxcomm._contract import AxisName
from jaxcomm.synchronization._exchange import Period, average_every, period_of
from jaxcomm.synchronization._require import require_int


@names_itself
def local_sgd(
    period: Period,
    *,
    aggregator: optax.GradientTransformation | None = None,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""Local SGD: workers take local steps and average every H steps.

    .. math:: x_i \gets x_i + \Delta_i, \qquad\text{and at every } H \text{-th step}\quad
              a \gets a + \frac{1}{n} \sum_i (x_i - a), \quad x_i \gets a

    Here :math:`a` is the parameters after the last exchange, and `aggregator` averages the
    displacements of workers from it. Any aggregator is valid, including one with compression or
    feedback. Steps between exchanges send nothing. An exchange sends the aggregator's messages and
    two float32. Optax adds the update to the parameters, so workers are equal up to the rounding of
    this addition. The anchor :math:`a`, from which the next displacement is measured, is
    bit-for-bit equal on all workers. It is stored in float32 or wider. After an exchange, 16-bit
    parameters are the anchor rounded to 16 bits. Changes smaller than a rounding unit therefore
    accumulate in the anchor over exchanges.

    A worker skips its own non-finite steps, for example after a NaN batch. Its other steps count in
    the mean, and it receives the mean like all workers. At each exchange, the state's field
    `diagnostics` counts these steps as `skipped_steps`. If the mean of an exchange is not finite,
    for example because a codec exceeds its capacity, the exchange counts as `skipped_exchanges`.
    Workers then keep their displacements and continue locally to the next exchange. Parameters that
    are not finite at the start stay non-finite, since optax adds updates to them.

    Args:
      period: H, an int of at least 1, or a schedule: a function of the number of steps so far,
        int32[].
      aggregator: Computes the mean. Default: the exact mean.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      A transformation to place *after* the optimizer, for parameters that differ by worker
      (:func:`jaxcomm.replicate`). Wrap an optimizer that keeps state in :func:`jaxcomm.per_worker`;
      its state then differs by worker. Pass `update(..., weight=w)` at every step or at no step.
      The mean is then weighted by the sum of a worker's weights since the last exchange, and a step
      of weight 0 is skipped. Use `weight` for the mini-batch counts of windows. `update(...,
      present=mask)` removes workers from an exchange. The mask has one bool per worker and is equal
      on all workers. Absent workers add nothing, continue locally, and join the next exchange with
      their current parameters. `update(..., flush=flag)`, one bool for all workers, exchanges in
      this step although the period is not over; pass it at the end of training, since the steps
      since the last exchange would be lost to the other workers.

    Raises:
      ValueError: If `period` is not a positive int or schedule. In `update`, if the parameters do
        not differ by worker, `weight` is not a scalar, `present` does not have one bool per worker,
        or `flush` is not one bool.

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
    return average_every(period, optax.sgd(1.0), aggregator=aggregator, axis_name=axis_name)


def post_local(start: int, period: int) -> Callable[[jax.Array], jax.Array]:
    """The schedule of post-local SGD: first an exchange in every step, later every `period` steps.

    Args:
      start: The number of steps before local steps begin, at least 0.
      period: The number of steps between exchanges after that.

    Returns:
      A `period` for :func:`local_sgd`.

    Raises:
      ValueError: If `start` is negative or `period` is not a positive int.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import post_local
      >>> print(post_local(start=2, period=4)(jnp.arange(4)))
      [1 1 4 4]
    """
    period_of(period)
    require_int(start, "start", least=0)
    return lambda step: jnp.where(step < start, 1, period)
