"""1-bit SGD."""

from typing import Any, Unpack

import optax

from jaxcomm._base import AxisName
from jaxcomm._require import checked
from jaxcomm.aggregation import all_gather_mean
from jaxcomm.aggregation._options import AggregatorOptions, takes_options
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import one_bit


@checked("decay")
@takes_options
def one_bit_sgd(
    axis_name: AxisName = "data",
    *,
    decay: float = 1.0,
    residual_dtype: Any = "float32",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""1-bit SGD: a bit a coordinate, decoded as the mean of its class, with error feedback.

    .. math:: a_i^t = x_i^t + e_i^t, \qquad m_{ij}^t = \begin{cases} \operatorname{mean}(a_i^t \ge
              0) & a_{ij}^t \ge 0 \\ \operatorname{mean}(a_i^t < 0) & a_{ij}^t < 0 \end{cases},
              \qquad e_i^{t+1} = a_i^t - m_i^t

    with means of each column of a leaf, which is what shares the index of the last axis, and the
    update is the mean of :math:`m_i^t`. A worker sends :math:`n - 1` times 1 bit a coordinate and 8
    bytes a column, and 4 for a flag.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      decay: What is kept of the residual from step to step, in (0, 1].
      residual_dtype: Of the residual: float32, or bfloat16 for half the memory.
      **options: As :class:`jaxcomm.AggregatorOptions` says; `scope` is `"leaf"` by default, whose
        columns have means of their own; a `"bucket"` is one column.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_gather_mean`. Each worker remembers one number a coordinate.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound, or an
        update is already summed.

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

    Differs from the paper: workers gather each other's bits, where the paper's each sum a part and
    quantize the sum again (`jaxcomm.two_stage_mean` does, of rows that are one column); the
    learning rate stands outside.
    """
    if options.get("scope") == "tree":
        raise ValueError(
            "`scope` must be 'leaf' or 'bucket', got 'tree': means that unlike units share keep "
            "the error of none within its bound."
        )
    return all_gather_mean(
        axis_name,
        error_feedback(one_bit(), decay=decay, residual_dtype=residual_dtype),
        **options,
    )
