"""PowerSGD's compressor: one step of a power iteration per training step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import Claims, Codec, Context, Fast, Memory
from jaxcomm.compression._means import over_peak
from jaxcomm.compression.low_rank._matrices import (
    as_matrix,
    matrix_shape,
    multiplied,
    product,
    require_count,
)


class LeftFactor(NamedTuple):
    """The statistic of one unit, reduced by a sum."""

    values: Any  # float32[rows, rank], M Q; float32[0] if the unit is sent exactly


class RightFactor(NamedTuple):
    """The payload of one unit."""

    values: jax.Array  # float32[columns, rank + drawn], M^T B; or the unit itself


def power_iteration(rank: int, *, drawn: int = 1, memory_rank: int | None = None) -> Codec:
    r"""Sends two thin factors of a matrix, which all workers project on one basis.

    .. math:: P = \sum_i M_i Q, \qquad B = \operatorname{orth}([P, R]), \qquad
              \bar M \approx B \Big(\frac{1}{n} \sum_i M_i^T B\Big)^T, \qquad
              Q' = \frac{1}{n} \sum_i M_i^T P'

    Here :math:`M_i` is a unit of worker i as a matrix, and :math:`P'` is the part of :math:`B` that
    spans the columns of :math:`P`. All workers keep the same :math:`Q` from step to step, so each
    step is one step of a power iteration. The last axis of a leaf is the columns, and the other
    axes together are the rows. The kernel of a dense layer does not change, and that of a
    convolution is `[height * width * inputs, outputs]`. A leaf of one axis is sent exactly, and so
    is a leaf whose factors have as many numbers as the leaf.

    :math:`R` has `drawn` random columns. All workers draw them with the public coin, so they are
    not sent. They make the codec a contraction. Without them, a matrix that is orthogonal to
    :math:`Q` would never be sent, nor would matrices whose left factors add up to 0.

    Args:
      rank: The number of columns of :math:`Q`, at least 1. Matrices with fewer rows or columns use
        fewer.
      drawn: The number of random columns. With 0, the codec is that of the paper. It then makes no
        claim, and feedback refuses it.
      memory_rank: The number of columns of :math:`Q` that memory holds, at least `rank`, the
        default. Codecs of different ranks then have memory of the same shapes, and can be the
        stages of :func:`jaxcomm.warmup`. A step changes the first `rank` columns only.

    Returns:
      A biased codec for :func:`jaxcomm.all_reduce_mean`. Its payload has `(rank + drawn) * columns`
      float32 values, and its statistic `rank * rows`. It claims the `contraction` 1 / size. In
      :func:`jaxcomm.all_gather_mean`, each worker has a separate basis and :math:`Q` stays as it
      was drawn.

    Raises:
      ValueError: If `rank`, `drawn` or `memory_rank` is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.low_rank import power_iteration
      >>> codec = power_iteration(2, drawn=0)
      >>> x = jnp.outer(jnp.arange(8.0), jnp.ones(6))  # A matrix of rank 1.
      >>> context = Context.of(x, memory=codec.init(x))
      >>> context = context.replace(statistics=codec.measure(context, x))
      >>> payload, _ = codec.encode(context, x)
      >>> payload.values.shape, bool(jnp.allclose(codec.decode(context, payload), x, atol=1e-4))
      ((6, 2), True)

    References:
      Vogels, Karimireddy, Jaggi, `PowerSGD <https://arxiv.org/abs/1905.13727>`_, 2019.

    Differs from the paper: the random columns are new. The columns of :math:`Q` are divided by
    their largest magnitude, since :math:`P` would otherwise grow with the square of the update.
    Householder reflections orthogonalize, instead of Gram-Schmidt.
    """
    require_count("rank", rank, 1)
    require_count("drawn", drawn, 0)

    if memory_rank is not None:
        require_count("memory_rank", memory_rank, rank)

    def is_smaller(shape: tuple[int, ...], kept: int) -> bool:
        """Whether factors with `kept` columns of Q have fewer numbers than the unit."""
        rows, columns = matrix_shape(shape)
        return 0 < kept * rows + (kept + drawn) * columns < rows * columns

    def kept_rank(shape: tuple[int, ...]) -> int:
        """The columns of Q; 0 if the unit is sent exactly."""
        kept = min(rank, *matrix_shape(shape))
        return kept if is_smaller(shape, kept) else 0

    def stored_rank(shape: tuple[int, ...]) -> int:
        """The columns of Q in memory. With `memory_rank`, they do not depend on `rank`."""
        if memory_rank is None:
            return kept_rank(shape)
        return min(memory_rank, *matrix_shape(shape)) if is_smaller(shape, 1) else 0

    def init(x: jax.Array) -> Memory:
        stored = stored_rank(x.shape)
        if not stored:
            return Memory()
        key = jax.random.key(0, impl="threefry2x32")  # All workers need the same Q.
        return Memory(shared=jax.random.normal(key, (x.shape[-1], stored), jnp.float32))

    def measure(context: Context, x: jax.Array) -> LeftFactor:
        kept = kept_rank(context.shape)
        if not kept:
            return LeftFactor(jnp.zeros(0, jnp.float32))
        return LeftFactor(product(as_matrix(x), context.memory.shared[:, :kept]))

    def basis(context: Context) -> jax.Array:
        left = context.statistics.values
        random = jax.random.normal(context.coins.public, (len(left), drawn), jnp.float32)
        return jnp.linalg.qr(jnp.concatenate([left, random], axis=1))[0]

    def encode(context: Context, x: jax.Array) -> tuple[RightFactor, Memory]:
        if not kept_rank(context.shape):
            return RightFactor(x), context.memory
        # On CPUs, `x.T @ basis` takes several times as long. The barriers keep XLA from returning
        # to it.
        rows = product(lax.optimization_barrier(basis(context).T), as_matrix(x))
        return RightFactor(lax.optimization_barrier(rows).T), context.memory

    def factors(context: Context, payload: RightFactor) -> tuple[jax.Array, jax.Array] | None:
        if not kept_rank(context.shape):
            return None
        return basis(context), payload.values / context.count

    def finalize(
        context: Context, payload: RightFactor | None, mean: jax.Array
    ) -> tuple[jax.Array, Memory]:
        kept = kept_rank(context.shape)
        if payload is None or not kept:
            return mean, context.memory
        right = payload.values[:, :kept]  # The columns of P come first.
        largest = jnp.max(jnp.abs(right), axis=0, keepdims=True)
        # A column of zeros would stay zero.
        before, others = jnp.split(context.memory.shared, [kept], axis=1)
        following = jnp.where(largest > 0, over_peak(right, largest), before)
        shared = jnp.concatenate([following, others], axis=1)
        return mean, context.memory._replace(shared=shared)

    return Codec(
        encode=encode,
        decode=multiplied(factors),
        init=init,
        measure=measure,
        reduce_statistics=LeftFactor("sum"),
        finalize=finalize,
        combine="sum",
        scope="leaf",
        claims=Claims(contraction=lambda size, workers: 1 / max(size, 1)) if drawn else Claims(),
        fast=Fast(linear=("measure", "encode"), exposes_nonfinite=("measure",), factors=factors),
    )
