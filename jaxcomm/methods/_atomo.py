"""ATOMO: unbiased sampling of singular components."""

from typing import Unpack

import optax

from jaxcomm._contract import AxisName
from jaxcomm._require import checked
from jaxcomm.aggregation import all_gather_mean
from jaxcomm.aggregation._coded import AggregatorOptions, takes_options
from jaxcomm.compression.low_rank import spectral_sampling
from jaxcomm.methods._power_sgd import require_leaves


@checked
@takes_options
def atomo(
    axis_name: AxisName = "data",
    *,
    rank: int,
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Sends randomly drawn singular components of each matrix; unbiased.

    .. math:: X_i = \sum_j \sigma_j u_j v_j^T, \qquad
              Q(X_i) = \sum_{j \in S_i} \frac{\sigma_j}{p_j} u_j v_j^T, \qquad
              \text{update } \frac{1}{n} \sum_i Q(X_i)

    :math:`X_i` is the gradient of a leaf on worker i, as a matrix of `rows * columns`: the last
    axis is the columns, and the other axes together are the rows. :math:`S_i` has at most `rank`
    components, drawn with the probabilities :math:`p_j = \min(\lambda \sigma_j, 1)`.
    :func:`jaxcomm.compression.low_rank.spectral_sampling` explains the codec.

    A worker sends :math:`n - 1` times `4 rank (rows + columns)` bytes per matrix, and 4 bytes for a
    flag that reports non-finite updates. Leaves of one axis, and leaves whose factors have as many
    numbers as the leaf, are sent exactly in the same message. Each step computes the singular
    vectors of each matrix, which is slow for large matrices.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      rank: The number of components that are sent, at least 1; the sparsity budget of the paper.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`. `scope` must be `"leaf"`, the
        default.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_gather_mean`.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.
      TypeError: If it is differentiated: the probabilities of the draw are integers.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.atomo(rank=1)
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> x = jnp.arange(1.0, 3.0)[:, None, None] * jnp.ones((2, 6, 4))  # Two matrices of rank 1.
      >>> means = jax.vmap(average, axis_name="data")(x)
      >>> bool(jnp.allclose(means, 1.5, atol=1e-5))
      True

    References:
      Wang et al., `ATOMO: Communication-efficient Learning via Atomic Sparsification
      <https://arxiv.org/abs/1806.04090>`_, 2018.

    Differs from the paper: systematic sampling draws the components, so the payload has a fixed
    size. Entry-wise ATOMO is :func:`jaxcomm.compression.sparsifiers.wangni`.
    """
    require_leaves(options)
    return all_gather_mean(spectral_sampling(rank), axis_name=axis_name, **options)
