"""ATOMO's compressor: sampled singular components of a matrix, without bias."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._contract import Claims, Codec, Context, Memory
from jaxcomm._require import Positive, checked
from jaxcomm.compression import _systematic
from jaxcomm.compression._means import over_peak
from jaxcomm.compression.low_rank._matrices import as_matrix, matrix_shape, product
from pallas_kernels._dispatch import nondifferentiable


class SpectralPayload(NamedTuple):
    """The payload of one unit; it decodes to `left @ right.T`."""

    left: jax.Array  # float32[rows, rank]; or the unit itself, if it is sent exactly
    right: jax.Array  # float32[columns, rank]; or float32[0]


def _probabilities(values: jax.Array, count: int) -> jax.Array:
    """The probabilities of Algorithm 1 of the paper, of descending `values`; their sum is `count`.

    A value is drawn for certain while it exceeds the average of the budget that remains.
    """
    relative = values / jnp.where(values[0] > 0, values[0], 1)
    budgets = jnp.arange(count, 0, -1, dtype=jnp.float32)
    tails = jnp.cumsum(relative[::-1])[::-1][:count]  # of values that are not drawn for certain
    certain = jnp.argmax(relative[:count] * budgets <= tails)
    tail = tails[certain]
    below = relative * (budgets[certain] / jnp.where(tail > 0, tail, 1))
    return jnp.where(jnp.arange(values.size) < certain, 1, jnp.minimum(below, 1))


def _components(matrix: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    r"""`(left, right, values, peak)`, of descending values: `matrix = peak * left @ right.T`.

    The shorter of the two factors is orthonormal, and `values` are the norms of the columns of the
    other one. The eigenvectors of the smaller Gram matrix are much faster than a singular value
    decomposition. The product is the matrix even if the eigenvectors are not accurate, as long as
    they are orthonormal.
    """
    rows, columns = matrix.shape
    tall = matrix if rows >= columns else matrix.T
    peak = jnp.max(jnp.abs(tall))
    scaled = over_peak(tall, peak)  # Squares neither overflow nor vanish.
    _, vectors = jnp.linalg.eigh(product(scaled.T, scaled))
    images = product(scaled, vectors)
    values = jnp.sqrt(jnp.sum(images**2, axis=0))
    order = jnp.argsort(-values)
    images, vectors = images[:, order], vectors[:, order]
    factors = (images, vectors) if rows >= columns else (vectors, images)
    return *factors, values[order], peak


def _codes(values: jax.Array, count: int) -> jax.Array:
    """The probabilities in fixed point, with an exact sum of at most `count`."""
    codes, excess = _systematic.round_up(_probabilities(values, count), values, count)
    # Usually the excess is a few units. Taken from the largest code, it does not change the others.
    reduced = codes.at[0].set(codes[0] - excess)
    return jnp.where(excess <= codes[0] >> 10, reduced, _systematic.shrink(codes, count))


@checked
def spectral_sampling(rank: Positive) -> Codec:
    r"""Sends `rank` singular components of a matrix, drawn with ATOMO's probabilities; unbiased.

    .. math:: M = \sum_j \sigma_j u_j v_j^T, \qquad
              Q(M) = \sum_{j \in S} \frac{\sigma_j}{p_j} u_j v_j^T, \qquad
              p_j = \min(\lambda \sigma_j, 1), \qquad \sum_j p_j = s

    .. math:: \mathbb{E}\|Q(M) - M\|^2 = \sum_j \frac{\sigma_j^2}{p_j} - \|M\|^2
              \le \Big(\frac{\sqrt{d}}{s} - 1\Big) \|M\|^2

    Here :math:`s` is `rank`, :math:`d` is the size of the unit, and :math:`S` has at most :math:`s`
    components. These probabilities have the least variance for an expected number of :math:`s`
    components. The last axis of a leaf is the columns, and the other axes together are the rows. A
    leaf of one axis is sent exactly, and so is a leaf whose factors have as many numbers as the
    leaf. A payload has `rank * (rows + columns)` float32 values.

    Encoding needs the eigenvectors of the smaller Gram matrix, whose time grows with the cube of
    the smaller side: for matrices of 1024 x 1024 it is longer than most steps.
    :func:`jaxcomm.compression.low_rank.power_iteration` needs matrix products only.

    The same sampling of entries, instead of singular components, is
    :func:`jaxcomm.compression.sparsifiers.wangni`.

    Args:
      rank: The number of components that are sent, at least 1.

    Returns:
      A codec that states its `variance`. `combine` is `None`.

    Raises:
      ValueError: If `rank` is out of range.
      TypeError: If it is differentiated: the probabilities of the draw are integers.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.low_rank import spectral_sampling
      >>> codec = spectral_sampling(1)
      >>> x = jnp.outer(jnp.arange(8.0), jnp.ones(6))  # A matrix of rank 1.
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> payload.left.shape, payload.right.shape
      ((8, 1), (6, 1))
      >>> bool(jnp.allclose(codec.decode(Context.of(x), payload), x, atol=1e-4))
      True

    References:
      Wang et al., `ATOMO: Communication-efficient Learning via Atomic Sparsification
      <https://arxiv.org/abs/1806.04090>`_, 2018.

    Differs from the paper: systematic sampling draws the components with one random offset,
    instead of one random number for each. So the payload has a fixed size. Each component has the
    same probability. The variance is the same too, since components are orthogonal. The singular
    vectors are eigenvectors of the smaller Gram matrix, so those of small singular values are less
    accurate. The codec remains unbiased, and the bound of the variance still holds. Probabilities
    are rounded to multiples of about :math:`s / 2^{31}`, and components are divided by these
    rounded probabilities.
    """

    def is_exact(shape: tuple[int, ...]) -> bool:
        rows, columns = matrix_shape(shape)
        return rank * (rows + columns) >= rows * columns

    def encode(context: Context, x: jax.Array) -> tuple[SpectralPayload, Memory]:
        if is_exact(context.shape):
            return SpectralPayload(x, jnp.zeros(0, jnp.float32)), context.memory
        (x,) = nondifferentiable("spectral_sampling", x)
        left, right, values, peak = _components(as_matrix(x))
        codes = _codes(values, rank)
        indices = _systematic.draw(codes, rank, context.keys.private)
        # A draw that selects no component has an index past the last one.
        left, right = (each.at[:, indices].get(mode="fill", fill_value=0) for each in (left, right))
        inverse = _systematic.inverse_of(codes, rank).at[indices].get(mode="fill", fill_value=0)
        return SpectralPayload(left * (inverse * peak)[None], right), context.memory

    def decode(context: Context, payload: SpectralPayload) -> jax.Array:
        if is_exact(context.shape):
            return payload.left / context.count
        return product(payload.left, payload.right.T).reshape(context.shape) / context.count

    def variance(size: int, workers: int) -> float:
        most = math.isqrt(size)  # The number of singular values is the smaller of the two sides.
        # rows * columns <= rank * (rows + columns) holds for all shapes of so few coordinates.
        return 0.0 if most < 2 * rank else _systematic.excess(most, rank) - 1

    return Codec(encode=encode, decode=decode, scope="leaf", claims=Claims(variance=variance))
