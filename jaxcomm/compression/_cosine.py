"""A cosine transform of chunks of a leaf before a codec."""

import functools
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._contract import (
    Codec,
    Context,
    Diagnostics,
    Entries,
    Fast,
    Mapped,
    Memory,
    PyTree,
)
from jaxcomm._require import require_codec
from jaxcomm.compression._blockwise import blockwise
from jaxcomm.compression.low_rank._matrices import as_matrix, matrix_shape, product, require_count

MOST = 256
"""The largest chunk: the transform is a product with a matrix of this size."""

Bound = Callable[[int, int], float]


def cosine_matrix(size: int) -> np.ndarray:
    r"""The orthonormal DCT-II, float32[size, size]; row k is the k-th frequency.

    .. math:: C_{kj} = \sqrt{\frac{2 - [k = 0]}{n}} \cos\Big(\frac{\pi}{n} \big(j +
              \tfrac{1}{2}\big) k\Big)
    """
    frequency, place = np.arange(size)[:, None], np.arange(size)[None] + 0.5
    scale = np.sqrt(np.where(frequency == 0, 1, 2) / size)
    return (scale * np.cos(np.pi / size * place * frequency)).astype(np.float32)


def cut(length: int, chunk: int) -> tuple[int, int]:
    """The number of chunks of an axis and their length: at most `chunk`, as equal as possible."""
    count = max(math.ceil(length / chunk), 1)
    return count, max(math.ceil(length / count), 1)


def cosine(codec: Codec, block_size: int = 64) -> Codec:
    r"""Encodes the cosine transform of each chunk of a leaf by `codec`.

    .. math:: Q_C(X) = C^T Q(C X C^T) C \quad \text{for each chunk } X

    with the orthonormal DCT-II :math:`C`. Neighbors in a matrix that change together become few
    large coefficients. Unlike :func:`jaxcomm.compression.rotated`, the transform is the same in all
    steps. It takes two products with a matrix of `block_size` rows, and preserves the sum of
    squares.

    A leaf of one axis is cut into chunks of up to `block_size` coordinates, which are transformed
    along this axis. Any other leaf is a matrix: its last axis is the columns, the other axes
    together are the rows. It is cut into square chunks of up to `block_size` rows, which are
    transformed along both.
    Chunks of an axis have equal lengths; if its length is not divisible, it is padded with fewer
    zeros than there are chunks, whose coefficients are sent too.

    Args:
      codec: A codec without memory; it encodes the coefficients of each chunk separately, as
        :func:`jaxcomm.compression.blockwise` does.
      block_size: The largest length of a chunk, a Python int from 1 to 256.

    Returns:
      A codec with the statistics, payload and `combine` of `codec`, for each chunk. It states the
      `variance` or `contraction` that holds for chunks of every number of coordinates up to that of
      the largest. The l2 norm of a chunk must be below the largest float32.

    Raises:
      ValueError: If `block_size` is out of range, or, in `init`, if the codec has memory: the
        feedback goes outside, `error_feedback(cosine(codec))`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression import cosine
      >>> from jaxcomm.compression.sparsifiers import top_k
      >>> codec, x = cosine(top_k(k=1)), jnp.full((6, 5), 2.0)
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> payload.values.shape
      (1, 1)
      >>> print(jnp.round(codec.decode(Context.of(x), payload)[0], 4))
      [2. 2. 2. 2. 2.]

    References:
      Ahmed et al., `Discrete Cosine Transform <https://doi.org/10.1109/T-C.1974.223784>`_, 1974.
    """
    require_codec(codec, user="cosine")
    require_count("block_size", block_size, 1)
    if block_size > MOST:
        raise ValueError(f"`block_size` must be at most {MOST}, got {block_size}.")

    def cuts(shape: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int]]:
        rows, columns = matrix_shape(shape)
        return cut(rows, block_size), cut(columns, block_size)

    @functools.cache
    def of_chunks(size: int) -> Codec:
        return blockwise(codec, size)

    def within(context: Context) -> Context:
        """The context of the coefficients, [chunks, coordinates of a chunk]."""
        (rows, height), (columns, width) = cuts(context.shape)
        return context.replace(shape=(rows * columns, height * width))

    def coefficients(x: jax.Array) -> jax.Array:
        (rows, height), (columns, width) = cuts(x.shape)
        matrix = as_matrix(x)
        short = rows * height - matrix.shape[0], columns * width - matrix.shape[1]
        padded = jnp.pad(matrix, [(0, each) for each in short])
        chunks = jnp.swapaxes(padded.reshape(rows, height, columns, width), 1, 2)
        if width > 1:
            chunks = product(chunks, jnp.asarray(cosine_matrix(width).T))
        if height > 1:
            chunks = product(jnp.asarray(cosine_matrix(height)), chunks)
        return chunks.reshape(rows * columns, height * width)

    def back(transformed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        (rows, height), (columns, width) = cuts(shape)
        chunks = transformed.reshape(rows, columns, height, width)
        if height > 1:
            chunks = product(jnp.asarray(cosine_matrix(height).T), chunks)
        if width > 1:
            chunks = product(chunks, jnp.asarray(cosine_matrix(width)))
        padded = jnp.swapaxes(chunks, 1, 2).reshape(rows * height, columns * width)
        length, breadth = matrix_shape(shape)
        return padded[:length, :breadth].reshape(shape)

    def init(x: jax.Array) -> Memory:
        _, size = within(Context.of(x)).shape
        memory = codec.init(jnp.zeros(size))
        if jax.tree.leaves(memory):
            raise ValueError(
                "`cosine` takes codecs without memory. Put the feedback outside: "
                "`error_feedback(cosine(codec))`."
            )
        return memory

    def measure(context: Context, x: jax.Array) -> PyTree:
        inner = within(context)
        return of_chunks(inner.shape[1]).measure(inner, coefficients(x))

    def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        inner = within(context)
        return of_chunks(inner.shape[1]).encode(inner, coefficients(x))

    def of_coefficients(inner: Context, payload: PyTree) -> jax.Array:
        return of_chunks(inner.shape[1]).decode(inner, payload)

    def decode(context: Context, payload: PyTree) -> jax.Array:
        return back(of_coefficients(within(context), payload), context.shape)

    def entries(inner: Context, payload: PyTree) -> Entries:
        of_payload = of_chunks(inner.shape[1]).fast.entries
        assert of_payload is not None
        return of_payload(inner, payload)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        inner = within(context)
        metrics = of_chunks(inner.shape[1]).diagnose(inner, coefficients(x), after)
        return metrics._replace(target=back(metrics.target, x.shape))

    def worst(bound: Bound | None, choose: Callable[[Iterable[float]], float]) -> Bound | None:
        @functools.cache
        def of_all(most: int, workers: int) -> float:
            assert bound is not None
            return choose(bound(size, workers) for size in range(1, most + 1))

        return bound and (lambda size, workers: of_all(min(size, block_size**2), workers))

    return codec.replace(
        init=init,
        measure=measure,
        encode=encode,
        decode=decode,
        diagnose=diagnose,
        claims=codec.claims._replace(
            variance=worst(codec.claims.variance, max),
            contraction=worst(codec.claims.contraction, min),
        ),
        scope="leaf",
        layout="concatenated",
        drop_overflow=codec.drop_overflow and cosine(codec.drop_overflow, block_size),
        fast=Fast(
            mapped=Mapped(of_coefficients, within, back, entries if codec.fast.entries else None)
        ),
    )
