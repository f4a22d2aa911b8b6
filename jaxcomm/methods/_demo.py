"""DeMo: momentum whose largest cosine coefficients are sent and subtracted."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from jaxcomm._contract import AxisName, Codec, Context, Memory, PyTree
from jaxcomm._require import Share, checked
from jaxcomm.aggregation import all_gather_mean
from jaxcomm.aggregation._coded import AggregatorOptions, takes_options
from jaxcomm.compression import sparsifiers
from jaxcomm.compression._transforms import cosine
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.methods._power_sgd import require_leaves


def _signs_of_mean(codec: Codec) -> Codec:
    """The codec, whose update is the signs of the mean."""

    def finalize(context: Context, payload: PyTree, mean: jax.Array) -> tuple[jax.Array, Memory]:
        update, after = codec.finalize(context, payload, mean)
        return jnp.sign(update), after

    return codec.replace(finalize=finalize)


@checked
@takes_options
def demo(
    axis_name: AxisName = "data",
    *,
    k: int = 32,
    block_size: int = 64,
    momentum: Share = 0.999,
    signs: bool = False,
    value_dtype: Any = "float32",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Decoupled momentum: workers send the fast components of their momenta, and keep the rest.

    .. math:: m_i \gets \beta m_i + x_i, \qquad q_i = C^T\, \mathrm{top}_k(C m_i), \qquad
              m_i \gets m_i - q_i, \qquad \text{update } \frac{1}{n} \sum_i q_i

    with the cosine transform :math:`C` of each chunk, along both axes of a matrix; see
    :func:`jaxcomm.compression.cosine`. Momenta are not averaged: each worker's own holds what has
    not been sent. It is the residual of
    :func:`jaxcomm.compression.feedback.error_feedback` with :math:`\beta` as `decay`. With
    :math:`k` of at least the coordinates of a chunk, all is sent in each step, and nothing is kept.

    A worker sends, for each chunk and :math:`n - 1` times, :math:`k` values of 4 bytes (2 for
    bfloat16) and their indices, of 9 bits each for 32 of 64 by 64, in whole words; and 4 bytes for
    a flag that reports non-finite updates. Follow it with an optimizer without momentum, such as
    `optax.sgd`.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      k: The number of coefficients of each chunk, a Python int; all, if a chunk has fewer.
      block_size: The largest length of a chunk, along each axis; a Python int from 1 to 256.
      momentum: :math:`\beta` in (0, 1].
      signs: Whether the update is the signs of the mean, as in the experiments of the paper. The
        momenta do not change.
      value_dtype: The dtype of the values on the wire: float32 or bfloat16.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`; `scope` must be `"leaf"`.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_gather_mean`. Each worker keeps one momentum per coordinate. Its derivative
      is that of the sent values, for the selection that it made.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.demo(k=1)
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> means = jax.vmap(average, axis_name="data")(jnp.array([[3.0, 3.0], [1.0, -1.0]]))
      >>> print(jnp.round(means, 4))
      [[2. 1.]
       [2. 1.]]

    References:
      Peng, Quesnelle and Kingma, `Decoupled Momentum Optimization
      <https://arxiv.org/abs/2411.19870>`_, 2024.

    Differs from the paper: gradients are not multiplied by the learning rate before they enter the
    momentum. A coefficient is divided by all workers; the released code divides by those that sent
    it. Chunks have equal lengths of at most `block_size`, with a few zeros of padding; the code
    uses the largest divisor, which may be 1. Leaves of more than two axes are matrices of their
    last axis.
    """
    require_leaves(options)
    compressed = cosine(sparsifiers.top_k(k=k, value_dtype=value_dtype), block_size)
    codec = error_feedback(compressed, decay=momentum)
    return all_gather_mean(
        _signs_of_mean(codec) if signs else codec, axis_name=axis_name, **options
    )
