"""ACP-SGD's compressors: one factor per step, on a basis that all workers already have."""

from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._base import Claims, Codec, Context, Memory
from jaxcomm._marked import FactoredDecode, Marked
from jaxcomm.compression.low_rank._matrices import (
    as_matrix,
    matrix_shape,
    product,
    require_count,
)

Side: TypeAlias = Literal["left", "right"]


class Basis(NamedTuple):
    """The statistic of one unit, equal on all workers, so it is not sent."""

    values: Any  # float32[rows or columns, rank + drawn], orthonormal; float32[0] if sent exactly


class Factors(NamedTuple):
    """The last factor of each side, from which the bases of the other side's steps follow."""

    left: Any  # float32[rows, rank]
    right: Any  # float32[columns, rank]


class Projected(NamedTuple):
    """The payload of one unit."""

    values: jax.Array  # float32[columns or rows, rank + drawn]; or the unit itself


def projection(rank: int, side: Side, *, drawn: int = 1) -> Codec:
    r"""Projects a matrix on a basis of one side; the mean is the basis of the other side's step.

    .. math:: \text{right: } B = \operatorname{orth}([Q, R]), \quad P_i = M_i B, \quad
              \bar M \approx \bar P B^T; \qquad
              \text{left: } B = \operatorname{orth}([P, R]), \quad Q_i = M_i^T B, \quad
              \bar M \approx B \bar Q^T

    Here :math:`M_i` is a unit of worker i as a matrix, as in
    :func:`jaxcomm.compression.low_rank.power_iteration`, :math:`P` and :math:`Q` are the means of
    the last steps, without their drawn columns, and :math:`R` has `drawn` random columns that all
    workers draw. All workers have the basis before the step, so one sum over workers suffices. A
    leaf of one axis is sent exactly, and so is a leaf with a factor that has as many numbers as
    the leaf.

    :func:`jaxcomm.power_sgd` with `alternate=True` uses the two sides in turn.

    Args:
      rank: The number of columns of the factors, at least 1. Matrices with fewer rows or columns
        use fewer.
      side: The side of the basis.
      drawn: The number of random columns. With 0, the codec makes no claim.

    Returns:
      A biased codec for :func:`jaxcomm.all_reduce_mean`, which claims the `contraction` 1 / size.
      Its payload has `(rank + drawn) * rows` float32 values for the side `"right"`, and `(rank +
      drawn) * columns` for `"left"`. It has no statistics to send.

    Raises:
      ValueError: If an argument is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.low_rank import projection
      >>> codec = projection(2, "right")
      >>> x = jnp.outer(jnp.arange(8.0), jnp.ones(6))
      >>> context = Context.of(x, memory=codec.init(x))
      >>> context = context.replace(statistics=codec.measure(context, x))
      >>> payload, _ = codec.encode(context, x)
      >>> payload.values.shape
      (8, 3)

    References:
      Zhang et al., `Evaluation and Optimization of Gradient Compression for Distributed Deep
      Learning <https://arxiv.org/abs/2306.08881>`_ (ACP-SGD), 2023.

    Differs from the paper: the random columns are new, factors are divided by the largest magnitude
    of each column, and Householder reflections orthogonalize.
    """
    require_count("rank", rank, 1)
    require_count("drawn", drawn, 0)
    if side not in get_args(Side):
        raise ValueError(f"`side` must be one of {get_args(Side)}, got {side!r}.")
    on_right = side == "right"

    def kept_rank(shape: tuple[int, ...]) -> int:
        """The columns of a factor in memory; 0 if the unit is sent exactly."""
        rows, columns = matrix_shape(shape)
        kept = min(rank, rows, columns)
        return kept if (kept + drawn) * max(rows, columns) < rows * columns else 0

    def init(x: jax.Array) -> Memory:
        if not (kept := kept_rank(x.shape)):
            return Memory()
        key = jax.random.key(0, impl="threefry2x32")  # All workers need the same factors.
        return Memory(
            shared=Factors(
                *(
                    jax.random.normal(jax.random.fold_in(key, number), (size, kept), jnp.float32)
                    for number, size in enumerate(matrix_shape(x.shape))
                )
            )
        )

    def measure(context: Context, x: jax.Array) -> Basis:
        if not kept_rank(context.shape):
            return Basis(jnp.zeros(0, jnp.float32))
        factors = context.memory.shared
        known = factors.right if on_right else factors.left
        random = jax.random.normal(context.coins.public, (len(known), drawn), jnp.float32)
        return Basis(jnp.linalg.qr(jnp.concatenate([known, random], axis=1))[0])

    def encode(context: Context, x: jax.Array) -> tuple[Projected, Memory]:
        if not kept_rank(context.shape):
            return Projected(x), context.memory
        basis = context.statistics.values
        if on_right:
            return Projected(product(as_matrix(x), basis)), context.memory
        # On CPUs, `x.T @ basis` takes several times as long. The barriers keep XLA from returning
        # to it.
        rows = product(lax.optimization_barrier(basis.T), as_matrix(x))
        return Projected(lax.optimization_barrier(rows).T), context.memory

    def factors(context: Context, payload: Projected) -> tuple[jax.Array, jax.Array] | None:
        if not kept_rank(context.shape):
            return None
        basis, mean = context.statistics.values, payload.values / context.count
        return (mean, basis) if on_right else (basis, mean)

    def finalize(
        context: Context, payload: Projected | None, mean: jax.Array
    ) -> tuple[jax.Array, Memory]:
        kept = kept_rank(context.shape)
        if payload is None or not kept:
            return mean, context.memory
        new = payload.values[:, :kept]  # The columns of the known factor come first.
        largest = jnp.max(jnp.abs(new), axis=0, keepdims=True)
        before = context.memory.shared
        old = before.left if on_right else before.right
        following = jnp.where(largest > 0, new / largest, old)  # Zeros would stay zero.
        after = before._replace(**{"left" if on_right else "right": following})
        return mean, context.memory._replace(shared=after)

    return Codec(
        encode=Marked(encode, linear=True, exposes_nonfinite=True),
        decode=FactoredDecode(factors, lambda context, payload: payload.values / context.count),
        init=init,
        measure=measure,
        reduce_statistics=Basis("equal"),
        finalize=finalize,
        combine="sum",
        scope="leaf",
        claims=Claims(contraction=lambda size, workers: 1 / max(size, 1)) if drawn else Claims(),
    )
