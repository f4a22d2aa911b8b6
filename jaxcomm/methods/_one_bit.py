"""1-bit SGD."""

from typing import Any, Unpack

import jax
import optax

from jaxcomm._contract import AxisName
from jaxcomm._require import checked
from jaxcomm.aggregation import all_gather_mean
from jaxcomm.aggregation._coded import AggregatorOptions, takes_options
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import one_bit


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
