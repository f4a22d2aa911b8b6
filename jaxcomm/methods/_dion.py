"""Dion: orthonormal updates of low rank, whose momentum keeps what a step has not sent."""

import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from jaxcomm._contract import AxisName, Codec, Context, Memory, PyTree
from jaxcomm._require import BelowOne, Positive, checked
from jaxcomm.aggregation import all_reduce_mean
from jaxcomm.aggregation._coded import AggregatorOptions, takes_options
from jaxcomm.compression._means import over_peak
from jaxcomm.compression.feedback._loop import feedback_loop
from jaxcomm.compression.low_rank import power_iteration
from jaxcomm.compression.low_rank._matrices import matrix_shape, product_of
from jaxcomm.methods._power_sgd import require_leaves


def _orthonormal(codec: Codec) -> Codec:
    """The codec of factors, whose update has a right factor of columns of length 1."""

    def finalize(context: Context, payload: PyTree, mean: jax.Array) -> tuple[jax.Array, Memory]:
        update, after = codec.finalize(context, payload, mean)
        factors = codec.fast.factors and codec.fast.factors(context, payload)
        if not factors:
            return update, after
        left, right = factors
        rows, columns = matrix_shape(context.shape)
        peaks = jnp.max(jnp.abs(right), axis=0, keepdims=True)
        relative = over_peak(right, peaks)  # Else squares overflow.
        length = jnp.maximum(jnp.linalg.norm(relative, axis=0, keepdims=True), 1)
        update = math.sqrt(columns / rows) * product_of(left, relative / length)
        return update.reshape(context.shape), after

    return codec.replace(finalize=finalize)


@checked
@takes_options
def dion(
    axis_name: AxisName = "data",
    *,
    rank: Positive,
    momentum: BelowOne = 0.95,
    feedback: bool = True,
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Orthonormal updates of low rank (Dion); workers send the factors of their momenta.

    .. math:: B_i = M_i + X_i, \qquad P = \operatorname{orth}\Big(\sum_i B_i Q\Big), \qquad
              R_i = B_i^T P, \qquad M_i \gets B_i - (1 - \mu) P R_i^T

    .. math:: \bar R = \frac{1}{n} \sum_i R_i, \qquad
              Q \gets \bar R D \text{ with columns of length 1}, \qquad
              \text{update } \sqrt{\tfrac{\text{columns}}{\text{rows}}}\; P Q^T

    :math:`X_i` is the gradient of a leaf on worker i, as a matrix of `rows * columns`: the last
    axis is the columns, and the other axes together are the rows. The momenta :math:`M_i` differ by
    worker and are never sent. Their mean, on which alone the updates depend, is that of one worker
    with the mean gradient. Only the component that a step has sent decays; the rest is sent later.

    A worker sends :math:`2 (n - 1) / n` times `4 rank (rows + columns)` bytes per matrix, in two
    all-reduces for all leaves, and a flag of 4 bytes that reports non-finite updates. Leaves of one
    axis, and leaves whose factors have as many numbers as the leaf, have the exact mean gradient
    as their update, without momentum: give them another optimizer.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      rank: The number of columns of :math:`Q`, at least 1. Matrices with fewer rows or columns use
        fewer. The authors use a quarter of the columns, up to all of them.
      momentum: :math:`\mu` in [0, 1).
      feedback: Whether the momentum keeps what was not sent. Without, :math:`M_i \gets \mu B_i`.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`. `scope` must be `"leaf"`, the
        default.

    Returns:
      A transformation to place before the learning rate, with the guarantees of
      :func:`jaxcomm.all_reduce_mean`. Each worker keeps one momentum per coordinate of a matrix.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm, optax
      >>> params = {"w": jnp.ones((6, 4)), "b": jnp.zeros(4)}
      >>> kinds = jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", params)
      >>> rates = {"matrix": optax.sgd(0.01), "vector": optax.adam(0.001)}
      >>> tx = optax.chain(jaxcomm.dion(rank=1), optax.partition(rates, kinds))

    References:
      Ahn, Xu, Abreu and Langford, `Dion: Distributed Orthonormalized Updates
      <https://arxiv.org/abs/2504.05295>`_, 2025, and the authors' `code
      <https://github.com/microsoft/dion>`_, whose square root has the rows of a transposed matrix.

    Differs from the paper: Householder reflections orthogonalize, in float32. A worker subtracts
    what it sent itself, where the paper averages momenta and factors; their means are equal. A
    column of :math:`\bar R` that is 0 stays 0. Weight decay, and the rate of vectors, embeddings
    and the head, are left to optax.
    """
    require_leaves(options)
    codec = power_iteration(rank, drawn=0)

    def initial(x: jax.Array) -> Any:
        return jnp.zeros_like(x) if jax.tree.leaves(jax.eval_shape(codec.init, x)) else ()

    def corrected(momenta: Any, x: jax.Array) -> jax.Array:
        return x if isinstance(momenta, tuple) else x + momenta

    def updated(momenta: Any, x: jax.Array, sent: jax.Array) -> Any:
        if isinstance(momenta, tuple):  # A leaf that is sent exactly.
            return momenta
        whole = corrected(momenta, x)
        return whole - (1 - momentum) * (sent if feedback else whole)

    compressed = feedback_loop(codec, initial=initial, corrected=corrected, updated=updated)
    return all_reduce_mean(_orthonormal(compressed), axis_name=axis_name, **options)
