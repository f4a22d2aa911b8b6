"""One step of a power iteration per training step: PowerSGD's, or ACP-SGD's of one factor."""

from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import Claims, Codec, Context, Fast, Keys, Memory, PyTree
from jaxcomm._require import Natural, Positive, checked, combine_of
from jaxcomm.compression._bits import ValuesPayload
from jaxcomm.compression._means import over_peak
from jaxcomm.compression._scaled import contraction_of
from jaxcomm.compression.low_rank._matrices import as_matrix, matrix_shape, multiplied, product


class LeftFactor(NamedTuple):
    """The statistic of one unit, reduced by a sum."""

    values: Any  # float32[rows, rank], M Q; float32[0] if the unit is sent exactly


def _basis(known: jax.Array, drawn: int, shared: jax.Array) -> jax.Array:
    """An orthonormal basis of the columns of a factor and of as many random ones."""
    random = jax.random.normal(shared, (len(known), drawn), jnp.float32)
    return jnp.linalg.qr(jnp.concatenate([known, random], axis=1))[0]


def _rows(basis: jax.Array, x: jax.Array) -> jax.Array:
    """`basis.T @ x`."""
    # On CPUs, `x.T @ basis` takes several times as long: the barriers keep XLA from it.
    rows = product(lax.optimization_barrier(basis.T), as_matrix(x))
    return lax.optimization_barrier(rows)


def _following(new: jax.Array, before: jax.Array) -> jax.Array:
    """The columns of a factor, each over its largest magnitude; one of zeros would stay zero."""
    largest = jnp.max(jnp.abs(new), axis=0, keepdims=True)
    return jnp.where(largest > 0, over_peak(new, largest), before)


@checked
def power_iteration(
    rank: Positive, *, drawn: Natural = 1, memory_rank: Positive | None = None
) -> Codec:
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

    :math:`R` has `drawn` random columns. All workers draw them with the shared key, so they are
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

    if memory_rank is not None and memory_rank < rank:
        raise ValueError(f"`memory_rank` must be at least `rank`={rank}, got {memory_rank}.")

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
        return _basis(context.statistics.values, drawn, context.keys.shared)

    def encode(context: Context, x: jax.Array) -> tuple[ValuesPayload, Memory]:
        if not kept_rank(context.shape):
            return ValuesPayload(x), context.memory
        return ValuesPayload(_rows(basis(context), x).T), context.memory

    def factors(context: Context, payload: ValuesPayload) -> tuple[jax.Array, jax.Array] | None:
        if not kept_rank(context.shape):
            return None
        return basis(context), payload.values / context.count

    def finalize(
        context: Context, payload: ValuesPayload | None, mean: jax.Array
    ) -> tuple[jax.Array, Memory]:
        kept = kept_rank(context.shape)
        if payload is None or not kept:
            return mean, context.memory
        right = payload.values[:, :kept]  # The columns of P come first.
        before, others = jnp.split(context.memory.shared, [kept], axis=1)
        shared = jnp.concatenate([_following(right, before), others], axis=1)
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


Side: TypeAlias = Literal["left", "right"]


class ProjectionStatistics(NamedTuple):
    """The statistics of one unit."""

    basis: Any  # float32[columns or rows, rank + drawn], orthonormal, equal on all workers
    of_factor: PyTree  # those of the factor codec


class Factors(NamedTuple):
    """The last factor of each side, from which the bases of the other side's steps follow."""

    left: Any  # float32[rows, rank]
    right: Any  # float32[columns, rank]


_EXACT = Codec(
    encode=lambda context, x: (ValuesPayload(x), context.memory),
    decode=lambda context, payload: payload.values / context.count,
    combine="sum",
    fast=Fast(linear=("encode",), exposes_nonfinite=("encode",)),
)


def _require_small_error(codec: Codec, context: Context, size: int) -> None:
    """Raises unless the relative error of the factor is below the claim of `projection`.

    Claims refer to the size of the unit, from which the size of its factor does not follow.
    """
    delta = contraction_of(codec, context.size, context.workers)
    if delta is not None and delta * context.size < 0.5:
        raise ValueError(
            f"`factor_codec` has a relative error of up to {1 - delta:.3g} for a factor of "
            f"{context.size} numbers, of a leaf of {size}, on {context.workers} workers, and must "
            "have one below 1: use more bits or smaller blocks, `blockwise(dither(bits=16), 64)`."
        )


def _claims(factor_codec: Codec | None) -> Claims:
    """The claims of a projection with a random direction, which captures 1 / size on average."""
    if factor_codec is None:
        return Claims(contraction=lambda size, workers: 1 / max(size, 1))
    variance, contraction, bounded = factor_codec.claims
    if variance is None and contraction is None:
        return Claims(bounded=bounded)
    return Claims(contraction=lambda size, workers: 1 / (2 * max(size, 1) ** 2))


@checked
def projection(
    rank: Positive, side: Side, *, drawn: Natural = 1, factor_codec: Codec | None = None
) -> Codec:
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

    With a `factor_codec` :math:`C`, workers send :math:`C(P_i)` or :math:`C(Q_i)`, and the mean of
    what they send is the factor. Its unit is the transposed factor, `[rank + drawn, rows or
    columns]`, so that its blocks do not mix columns.

    .. math:: \|M - C(M B) B^T\|^2 = \|M - M B B^T\|^2 + \|M B - C(M B)\|^2

    :func:`jaxcomm.power_sgd` with `alternate=True` uses the two sides in turn.

    Args:
      rank: The number of columns of the factors, at least 1. Matrices with fewer rows or columns
        use fewer.
      side: The side of the basis.
      drawn: The number of random columns. With 0, the codec makes no claim.
      factor_codec: The codec of the factors, with `combine="sum"` and without memory, such as
        `dither(bits=16)`. Default: factors are sent as float32.

    Returns:
      A biased codec for :func:`jaxcomm.all_reduce_mean`, which claims the `contraction` 1 / size.
      Its payload has `(rank + drawn) * rows` float32 values for the side `"right"`, and `(rank +
      drawn) * columns` for `"left"`. It has no statistics to send. With a `factor_codec`, payload
      and statistics of a factor are those of that codec, and the claim is 1 / (2 size²), if that
      codec has one.

    Raises:
      ValueError: If an argument is out of range. When encoding, if the relative error of
        `factor_codec` may be 1 - 1 / (2 size) or more for the size of the factor.

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
      (3, 8)

    References:
      Zhang et al., `Evaluation and Optimization of Gradient Compression for Distributed Deep
      Learning <https://arxiv.org/abs/2306.08881>`_ (ACP-SGD), 2023.

    Differs from the paper: the random columns are new, factors are divided by the largest magnitude
    of each column, and Householder reflections orthogonalize.
    """
    if factor_codec is not None and factor_codec.combine != "sum":
        raise ValueError(
            "`factor_codec` must be a codec whose payloads can be summed, such as "
            f"`dither(bits=16)`, got {combine_of(factor_codec)}."
        )
    on_right = side == "right"
    coder = _EXACT if factor_codec is None else factor_codec

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

    def of_factor(context: Context) -> Context:
        """The context of the factor, whose keys are independent of those of the basis."""
        kept, (rows, columns) = kept_rank(context.shape), matrix_shape(context.shape)
        measured = context.statistics.of_factor if context.statistics else ()
        return Context(
            Keys(*(jax.random.fold_in(key, 1) for key in context.keys)),
            statistics=measured,
            workers=context.workers,
            count=context.count,
            shape=(kept + drawn, rows if on_right else columns),
        )

    def basis_of(context: Context) -> jax.Array:
        factors = context.memory.shared
        known = factors.right if on_right else factors.left
        return _basis(known, drawn, context.keys.shared)

    def project(x: jax.Array, basis: jax.Array) -> jax.Array:
        """The transposed factor."""
        return product(as_matrix(x), basis).T if on_right else _rows(basis, x)

    def measure(context: Context, x: jax.Array) -> ProjectionStatistics:
        inner = of_factor(context)
        if not kept_rank(context.shape):  # Sends no statistics, in the structure of others.
            one = jnp.zeros((1, 1), jnp.float32)
            like = jax.eval_shape(lambda: coder.measure(inner.replace(shape=one.shape), one))
            empty = jax.tree.map(lambda leaf: jnp.zeros(0, leaf.dtype), like)
            return ProjectionStatistics(jnp.zeros(0, jnp.float32), empty)
        basis = basis_of(context)
        return ProjectionStatistics(basis, coder.measure(inner, project(x, basis)))

    def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        if not kept_rank(context.shape):
            return ValuesPayload(x), context.memory
        inner = of_factor(context)
        if factor_codec is not None:
            _require_small_error(factor_codec, inner, x.size)
        payload, _ = coder.encode(inner, project(x, context.statistics.basis))
        return payload, context.memory

    def factors(context: Context, payload: PyTree) -> tuple[jax.Array, jax.Array] | None:
        if not kept_rank(context.shape):
            return None
        basis, factor = context.statistics.basis, coder.decode(of_factor(context), payload).T
        return (factor, basis) if on_right else (basis, factor)

    def finalize(
        context: Context, payload: PyTree | None, mean: jax.Array
    ) -> tuple[jax.Array, Memory]:
        kept = kept_rank(context.shape)
        if payload is None or not kept:
            return mean, context.memory
        factor = coder.decode(of_factor(context.received(context.workers)), payload).T
        new = factor[:, :kept]  # The columns of the known factor come first.
        before, name = context.memory.shared, "left" if on_right else "right"
        after = before._replace(**{name: _following(new, getattr(before, name))})
        return mean, context.memory._replace(shared=after)

    return Codec(
        encode=encode,
        decode=multiplied(factors),
        init=init,
        measure=measure,
        reduce_statistics=ProjectionStatistics("equal", coder.reduce_statistics),
        finalize=finalize,
        combine="sum",
        scope="leaf",
        claims=_claims(factor_codec) if drawn else Claims(),
        fast=Fast(
            linear=tuple({"encode"} & {*coder.fast.linear}),
            exposes_nonfinite=tuple({"encode"} & {*coder.fast.exposes_nonfinite}),
            factors=factors,
        ),
    )
