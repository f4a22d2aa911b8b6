"""One bit per coordinate: majority votes on signs, and signs or two means with feedback."""

from typing import Any, Unpack

import jax
import optax

from jaxcomm._contract import AxisName
from jaxcomm._require import checked
from jaxcomm.aggregation import all_gather_mean, majority_vote
from jaxcomm.aggregation._coded import AggregatorOptions, takes_options
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.feedback import momentum as with_momentum
from jaxcomm.compression.quantizers import one_bit, scaled_signs, signs


@checked
def sign_sgd(
    axis_name: AxisName = "data", *, seed: int | jax.Array = 0
) -> optax.GradientTransformationExtraArgs:
    r"""signSGD with majority vote: the update is the sign that most workers have.

    .. math:: v = \operatorname{sgn} \sum_{i=1}^n \operatorname{sgn}(x_i)

    This is :func:`jaxcomm.majority_vote` under its paper's name. Random bits break ties and decide
    the sign of zeros. A worker sends :math:`2 (n-1)/n` times one bit per coordinate. The method is
    biased and has no error feedback, so the error is lost.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      seed: The seed of the random bits; may be traced.

    Returns:
      A transformation to place before the optimizer, such as `optax.sgd(1e-3)`.

    Raises:
      ValueError: Under the conditions of :func:`jaxcomm.majority_vote`.
      TypeError: If an update is differentiated: rounding has no derivative.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxcomm
      >>> tx = optax.chain(jaxcomm.sign_sgd(), optax.sgd(0.5))
      >>> update = lambda g: tx.update(g, tx.init(g))[0]
      >>> gradients = jnp.array([[0.1, -2.0], [0.2, 5.0], [-9.0, -1.0]])
      >>> print(jax.vmap(update, axis_name="data")(gradients)[0])
      [-0.5  0.5]

    References:
      Bernstein et al., `signSGD: Compressed Optimisation for Non-Convex Problems
      <https://arxiv.org/abs/1802.04434>`_, 2018.
    """
    return majority_vote(axis_name, seed=seed)


@checked
def signum(
    axis_name: AxisName = "data",
    *,
    momentum: float = 0.9,
    seed: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Signum with majority vote: workers vote with the signs of their momentum.

    .. math:: m_i^t = \beta\, m_i^{t-1} + (1 - \beta)\, x_i^t, \qquad
              v^t = \operatorname{sgn} \sum_{i=1}^n \operatorname{sgn}(m_i^t)

    The momentum is applied before the vote, so the optimizer after it needs none. A worker sends
    the same bytes as with :func:`jaxcomm.majority_vote`: :math:`2 (n-1)/n` times one bit per
    coordinate, and a flag that reports non-finite updates.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      momentum: :math:`\beta` in [0, 1), a Python float; 0 is :func:`sign_sgd`.
      seed: The seed of the random bits that decide on zeros and ties; may be traced.

    Returns:
      A transformation to place before the optimizer, such as `optax.sgd(1e-3)`. Each worker keeps
      one float32 per coordinate. A non-finite coordinate on any worker makes the update NaN on all
      workers and changes no worker's momentum.

    Raises:
      ValueError: If `momentum` is out of range; in `update`, under the conditions of
        :func:`jaxcomm.majority_vote`.
      TypeError: If an update is differentiated: rounding has no derivative.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.signum(momentum=0.5)
      >>> def two_steps(first, second):
      ...     _, state = tx.update(first, tx.init(first))
      ...     return tx.update(second, state)[0]
      >>> print(jax.vmap(two_steps, axis_name="data")(jnp.array([8.0]), jnp.array([-1.0])))
      [1.]

    References:
      Bernstein et al., `signSGD: Compressed Optimisation for Non-Convex Problems
      <https://arxiv.org/abs/1802.04434>`_, 2018.
      Bernstein et al., `signSGD with Majority Vote is Communication Efficient and Fault Tolerant
      <https://arxiv.org/abs/1810.05291>`_, 2019.
    """
    return majority_vote(axis_name, codec=with_momentum(signs(), momentum), seed=seed)


@checked
@takes_options
def ef_sign_sgd(
    axis_name: AxisName = "data",
    *,
    decay: float | jax.Array = 1.0,
    residual_dtype: Any = "float32",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""EF-signSGD: signs times the mean magnitude of a leaf, with error feedback.

    .. math:: a_i^t = x_i^t + e_i^t, \qquad
              m_i^t = \frac{\|a_i^t\|_1}{d} \operatorname{sgn}(a_i^t), \qquad
              e_i^{t+1} = a_i^t - m_i^t

    The update is the mean of :math:`m_i^t` over workers. Signs with different magnitudes cannot be
    summed, so workers gather them. A worker sends :math:`n - 1` payloads of 1 bit per coordinate
    and 4 bytes per leaf, and 4 bytes for a flag that reports non-finite updates.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      decay: The factor that multiplies the residual in each step, in (0, 1].
      residual_dtype: The dtype of :math:`e_i`: float32, or bfloat16 for half the memory.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`. `scope` sets which coordinates
        share a magnitude and is `"leaf"` by default.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_gather_mean`. Each worker keeps one residual per coordinate.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.
      TypeError: If an update is differentiated: rounding has no derivative.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.ef_sign_sgd()
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([[3.0, -1.0], [0.0, 4.0]])))
      [[2. 0.]
       [2. 0.]]

    References:
      Karimireddy et al., `Error Feedback Fixes SignSGD and other Gradient Compression Schemes
      <https://arxiv.org/abs/1901.09847>`_, 2019.

    Differs from the paper: the learning rate is applied outside, so a residual is scaled by the
    learning rate of the step that sends it; sgn(0) = +1.
    """
    return all_gather_mean(
        error_feedback(scaled_signs(), decay=decay, residual_dtype=residual_dtype),
        axis_name=axis_name,
        **options,
    )


@checked
@takes_options
def one_bit_sgd(
    axis_name: AxisName = "data",
    *,
    decay: float | jax.Array = 1.0,
    residual_dtype: Any = "float32",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""1-bit SGD: sends the sign of each coordinate and the mean of each sign, with error feedback.

    .. math:: a_i^t = x_i^t + e_i^t, \qquad m_{ij}^t = \begin{cases} \operatorname{mean}(a_i^t \ge
              0) & a_{ij}^t \ge 0 \\ \operatorname{mean}(a_i^t < 0) & a_{ij}^t < 0 \end{cases},
              \qquad e_i^{t+1} = a_i^t - m_i^t

    Each column of a leaf has two means, one per sign. A column is the set of coordinates with the
    same index in the last axis. The update is the mean of :math:`m_i^t` over workers. A worker
    sends :math:`n - 1` payloads of 1 bit per coordinate and 8 bytes per column, and 4 bytes for a
    flag that reports non-finite updates.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      decay: The factor that multiplies the residual in each step, in (0, 1].
      residual_dtype: The dtype of :math:`e_i`: float32, or bfloat16 for half the memory.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`. `scope` is `"leaf"` by
        default, with separate means per column; a `"bucket"` is one column.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_gather_mean`. Each worker keeps one residual per coordinate.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.
      TypeError: If an update is differentiated: rounding has no derivative.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.one_bit_sgd()
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(
      ...     jax.vmap(average, axis_name="data")(jnp.array([[3.0, 1.0, -4.0], [0.0, 4.0, -2.0]]))
      ... )
      [[ 2.  2. -3.]
       [ 2.  2. -3.]]

    References:
      Seide et al., `1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
      Distributed Training of Speech DNNs
      <https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html>`_, 2014.

    Differs from the paper: workers gather the bits of all workers. In the paper, each worker sums a
    part and quantizes the sum again; `jaxcomm.two_stage_mean` does the same with one column per
    row. The learning rate is applied outside.
    """
    return all_gather_mean(
        error_feedback(one_bit(), decay=decay, residual_dtype=residual_dtype),
        axis_name=axis_name,
        **options,
    )
