"""Top-k sparsification with error feedback."""

from typing import Any, Unpack

import jax
import optax

from jaxcomm._contract import AxisName
from jaxcomm._require import Positive, Share, checked
from jaxcomm.aggregation import all_gather_mean
from jaxcomm.aggregation._coded import AggregatorOptions, takes_options
from jaxcomm.compression import sparsifiers
from jaxcomm.compression.feedback import error_feedback


@checked
@takes_options
def top_k_sgd(
    axis_name: AxisName = "data",
    *,
    ratio: Share | None = None,
    k: Positive | None = None,
    decay: float | jax.Array = 1.0,
    residual_dtype: Any = "float32",
    value_dtype: Any = "float32",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Sends the coordinates of largest magnitude, and adds the others to the next gradient.

    .. math:: a_i^t = x_i^t + \beta e_i^t, \qquad q_i^t = \mathrm{top}_k(a_i^t), \qquad
              e_i^{t+1} = a_i^t - q_i^t, \qquad \text{update } \frac{1}{n} \sum_i q_i^t

    A worker sends :math:`n - 1` times :math:`k` values of 4 bytes (2 for bfloat16), :math:`k`
    indices of about :math:`2 + \log_2(d / k)` bits, and 4 bytes for a flag that reports non-finite
    updates. :func:`jaxcomm.deep_gradient_compression` adds momentum to this method.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      ratio: :math:`k / d`, in (0, 1], of each bucket or leaf; at least one coordinate is sent.
      k: The number of coordinates of each bucket or leaf, in place of `ratio`.
      decay: :math:`\beta`, in (0, 1].
      residual_dtype: The dtype of :math:`e_i`: float32, or bfloat16 for half the memory.
      value_dtype: The dtype of the values on the wire: float32 or bfloat16.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_gather_mean`. Each worker keeps one residual per coordinate. Its derivative
      is that of the sent values, for the selection that it made.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.top_k_sgd(k=1)
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([[3.0, 1.0], [0.0, 4.0]])))
      [[1.5 2. ]
       [1.5 2. ]]

    References:
      Aji and Heafield, `Sparse Communication for Distributed Gradient Descent
      <https://arxiv.org/abs/1704.05021>`_, 2017.
      Stich et al., `Sparsified SGD with Memory <https://arxiv.org/abs/1809.07599>`_, 2018.

    Differs from the papers: the residual holds gradients, and the learning rate is applied to the
    mean.
    """
    codec = sparsifiers.top_k(ratio=ratio, k=k, value_dtype=value_dtype)
    feedback = error_feedback(codec, decay=decay, residual_dtype=residual_dtype)
    return all_gather_mean(feedback, axis_name=axis_name, **options)
