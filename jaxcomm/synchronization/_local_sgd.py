"""Local SGD, and what it becomes with an outer optimizer or with averaged momentum."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxcomm._contract import AxisName
from jaxcomm._require import BelowOne, Natural, Positive, checked
from jaxcomm._workers import per_worker
from jaxcomm.aggregation import all_gather_mean
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import coarse_top_k
from jaxcomm.synchronization._exchange import Period, average_every, averaged_every


@checked
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
        not differ by worker, `weight` is not a scalar, or `present` does not have one bool per
        worker.

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


@checked
def post_local(start: Natural, period: Positive) -> Callable[[jax.Array], jax.Array]:
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
    return lambda step: jnp.where(step < start, 1, period)


@checked
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
    own = per_worker(inner, axis_name=axis_name)
    return averaged_every(period, optax.sgd(1.0), None, axis_name, own)


@checked
def slowmo(
    period: Period,
    *,
    slow_learning_rate: float = 1.0,
    momentum: BelowOne = 0.5,
    learning_rate: optax.ScalarOrSchedule = 1.0,
    aggregator: optax.GradientTransformation | None = None,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""Local SGD with a slow momentum over exchanges (SlowMo).

    .. math:: u \gets \beta u + \frac{1}{\gamma} (a - \bar x), \qquad
              a \gets a - \alpha \gamma u, \qquad x_i \gets a

    Here :math:`\bar x` is the mean over workers, and :math:`a` the parameters after the last
    exchange. It sends the same messages as :func:`local_sgd`.

    Args:
      period: As for :func:`local_sgd`.
      slow_learning_rate: :math:`\alpha`.
      momentum: :math:`\beta` in [0, 1). With 0 and `slow_learning_rate=1`, the method is
        :func:`local_sgd`.
      learning_rate: :math:`\gamma` of the inner optimizer. A number, or a schedule of the number of
        exchanges. Dividing by it makes :math:`u` independent of the learning rate.
      aggregator: As for :func:`local_sgd`.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      A transformation as returned by :func:`local_sgd`. An exchange does not change the state of
      the inner optimizer.

    Raises:
      ValueError: As :func:`local_sgd` does, or if `momentum` is out of range.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import slowmo
      >>> tx = optax.chain(optax.sgd(0.1), slowmo(period=12, momentum=0.5, learning_rate=0.1))

    References:
      Wang et al., `SlowMo <https://arxiv.org/abs/1910.00643>`_, 2019.
    """
    rate = learning_rate if callable(learning_rate) else lambda count: learning_rate
    slow = optax.chain(
        optax.scale_by_schedule(lambda count: 1 / rate(count)),
        optax.trace(momentum),
        optax.scale_by_schedule(lambda count: -slow_learning_rate * rate(count)),
    )
    return average_every(period, slow, aggregator=aggregator, axis_name=axis_name)


@checked
def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    period: Period,
    *,
    aggregator: optax.GradientTransformation | None = None,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""Two optimizers (DiLoCo): an inner one per worker, and an outer one on the mean displacement.

    .. math:: x_i \gets x_i + \mathrm{inner}(g_i), \qquad\text{and at every } H \text{-th step}\quad
              a \gets a + \mathrm{outer}\Big(\frac{1}{n} \sum_i (a - x_i)\Big), \quad x_i \gets a

    Here :math:`a` is the parameters after the last exchange. The state of `inner` differs by
    worker; that of `outer` is equal on all workers. Steps between exchanges send nothing. An
    exchange sends the messages of `aggregator`. Non-finite steps are skipped, and 16-bit parameters
    are averaged, as in :func:`local_sgd`.

    Args:
      inner: Any optax optimizer, such as `optax.adamw`.
      outer: Any optax optimizer, such as `optax.sgd(0.7, momentum=0.9, nesterov=True)`. With
        `optax.sgd(1.0)`, the method is :func:`local_sgd`.
      period: As for :func:`local_sgd`.
      aggregator: As for :func:`local_sgd`. Its input is the displacement of each worker.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      A complete optimizer, for parameters that differ by worker (:func:`jaxcomm.replicate`). It
      accepts `weight`, `present` and `flush` as :func:`local_sgd` does.

    Raises:
      ValueError: As :func:`local_sgd` does, or if an optimizer is not an optax transformation.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import diloco
      >>> outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
      >>> tx = diloco(optax.sgd(0.1, momentum=0.9), outer, period=50)

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023. Thérien et al., `MuLoCo
      <https://arxiv.org/abs/2505.23725>`_, 2025: with `optax.contrib.muon` as `inner`, and an
      `aggregator` of few bits with feedback.
    """
    return optax.chain(
        per_worker(inner, axis_name=axis_name),
        average_every(period, outer, aggregator=aggregator, axis_name=axis_name),
    )


@checked
def sparseloco(
    inner: optax.GradientTransformation,
    period: Period = 30,
    *,
    k: int = 64,
    block_size: int = 4096,
    decay: float = 0.95,
    learning_rate: optax.ScalarOrSchedule = 1.0,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""DiLoCo that sends the largest coordinates of each block in 2 bits, and keeps the rest.

    .. math:: e_i \gets \beta e_i + (a - x_i), \qquad m_i = C(e_i), \qquad e_i \gets e_i - m_i,
              \qquad a \gets a - \alpha \frac{1}{n} \sum_i m_i, \qquad x_i \gets a

    at every H-th step. C is :func:`jaxcomm.compression.sparsifiers.coarse_top_k`. What an exchange
    does not send is sent later, so the residual :math:`e_i` takes the place of an outer momentum.
    An exchange sends n - 1 times k values of 2 bits per block, k indices of about 8 bits, two
    float32 per block, and 12 bytes: for the defaults, 0.2 bits per coordinate and worker, 186 times
    less than float32. Covenant-72B states 146 times: 12 bits per index, and no magnitudes. The
    entropy of uniform places and of 2 bits of normal values allows 198 times, with magnitudes. From
    about 300 workers on, a float32 all-reduce sends less.

    Args:
      inner: Any optax optimizer, such as `optax.adamw`; its state differs by worker.
      period: H, as for :func:`local_sgd`.
      k: The number of coordinates of each block that are sent. The default is 1.6 %; the paper
        sends 1 to 3 %.
      block_size: Coordinates of a block.
      decay: :math:`\beta`, in (0, 1].
      learning_rate: :math:`\alpha`.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      A complete optimizer, as from :func:`diloco`.

    Raises:
      ValueError: If an option is out of range. In `update`, as :func:`local_sgd` does.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import sparseloco
      >>> tx = sparseloco(optax.adamw(4e-4))

    References:
      Sarfi et al., `Communication Efficient LLM Pre-training with SparseLoCo
      <https://arxiv.org/abs/2508.15706>`_, 2025. The defaults are the settings of Lidin et al.,
      `Covenant-72B <https://arxiv.org/abs/2603.08163>`_, 2026.

    Differs from the paper: see :func:`jaxcomm.compression.sparsifiers.coarse_top_k`. Code that the
    authors released before the paper divides the sum of a coordinate by the number of workers that
    sent it; the paper, and this function, divide by the number of all workers. For replicas
    with sharded parameters, compose :func:`diloco` with this aggregator in
    :func:`jaxcomm.shard_local`.
    """
    codec = error_feedback(coarse_top_k(k=k, block_size=block_size), decay=decay)
    return diloco(
        inner,
        optax.sgd(learning_rate),
        period,
        aggregator=all_gather_mean(codec, axis_name=axis_name),
        axis_name=axis_name,
    )
