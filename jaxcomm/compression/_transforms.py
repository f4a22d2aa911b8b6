"""Transforms before a codec: random rotations, and cosines of chunks."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _noise
from jaxcomm._contract import (
    Codec,
    Context,
    Diagnostics,
    Entries,
    Fast,
    Keys,
    Mapped,
    Memory,
    PyTree,
)
from jaxcomm._require import Range, checked
from jaxcomm.compression._bits import require_countable
from jaxcomm.compression._blockwise import blockwise
from jaxcomm.compression._scaled import bounds_at, combined_with, without_memory
from jaxcomm.compression.low_rank._matrices import as_matrix, matrix_shape, product


def _padded(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    require_countable(size, 2**31)
    return 1 << max(size - 1, 0).bit_length()


def _butterfly(x: jax.Array) -> jax.Array:
    """One of the log2(d) equal steps of a Walsh-Hadamard transform of `x`, float32[d]."""
    upper, lower = x.reshape(2, -1)
    return jnp.stack([upper + lower, upper - lower], axis=1).ravel()


def hadamard(x: jax.Array) -> jax.Array:
    r""":math:`H x / \sqrt d` by :math:`d \log_2 d` additions; its own inverse.

    .. math:: H_1 = (1), \qquad H_{2 d} = \begin{pmatrix} H_d & H_d \\ H_d & -H_d \end{pmatrix}

    The loop halves after every second step, so that sums of large coordinates do not overflow. It
    is a `fori_loop`, so that the compiler does not fuse steps and repeat all additions for each
    coordinate.

    Args:
      x: float32[d], d a power of two.
    """
    steps = x.size.bit_length() - 1
    if steps > 1:
        x = lax.fori_loop(0, steps // 2, lambda _, x: _butterfly(_butterfly(x)) * 0.5, x)
    return _butterfly(x) * 0.5**0.5 if steps % 2 else x


def _signs(shared: jax.Array, size: int) -> jax.Array:
    """Random signs, the same on all workers, float32[size]."""
    odd = _noise.bits(shared, (size,)) & jnp.uint32(1)
    return jnp.where(odd == 1, jnp.float32(-1), jnp.float32(1))


def _rotate(shared: jax.Array, x: jax.Array) -> jax.Array:
    """Pads `x` with zeros and rotates it: float32[padded]."""
    size = _padded(x.size)
    return hadamard(jnp.pad(x.ravel(), (0, size - x.size)) * _signs(shared, size))


def _rotate_back(shared: jax.Array, y: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_rotate`, without the padding."""
    return (hadamard(y) * _signs(shared, y.size))[: math.prod(shape)].reshape(shape)


@checked
def rotated(codec: Codec) -> Codec:
    r"""Rotates an array by a random orthogonal map before `codec`, and back after decoding.

    .. math:: Q_R(x) = R^{-1} Q(R x), \qquad R = \frac{1}{\sqrt d} H D

    with random signs :math:`D`, the same on all workers, and the Walsh-Hadamard matrix :math:`H`.
    The rotation takes :math:`d \log_2 d` additions. It preserves norms, while :math:`\max_j |(R
    x)_j|` is about :math:`\sqrt{2 \ln d / d}\, \|x\|` for any :math:`x`. Levels from the least to
    the largest coordinate are then close together. With :math:`k` levels the bound on the squared
    error falls from :math:`\frac{d}{2 (k-1)^2} \|x\|^2` to :math:`\frac{2 \ln d + 2}{(k-1)^2}
    \|x\|^2`. The gain is large if few coordinates are large. There is none if all coordinates have
    similar magnitudes.

    The array is padded with zeros to a power of two, at most to nearly twice as many coordinates.
    All of them are sent. `blockwise(rotated(codec), 1024)` pads the last block only, and needs ten
    additions per coordinate at any size.

    Args:
      codec: A codec without memory. Memory that exists for `diagnostics=True` only is allowed.

    Returns:
      A codec with the statistics, payload and `combine` of `codec` at the padded size. It states
      the `variance` or `contraction` of `codec` at that size, and is unbiased if `codec` is. The
      l2 norm of `x` must be below half the largest float32.

    Raises:
      ValueError: In `init`, if the codec has memory. The rotation changes at each step, so feedback
        must be outside: `error_feedback(rotated(codec))`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression import rotated
      >>> from jaxcomm.compression.quantizers import dither
      >>> x = jnp.zeros(1024).at[3].set(32.0)
      >>> for codec in (dither(levels=1), rotated(dither(levels=1))):
      ...     print(codec.measure(Context.of(x), x).max_abs)
      32.0
      1.0

    References:
      Suresh et al., `Distributed Mean Estimation with Limited Communication
      <https://arxiv.org/abs/1611.00429>`_, 2017.
    """

    def inner_keys(keys: Keys) -> Keys:
        # So that the draws of the codec do not repeat these signs.
        return keys._replace(shared=jax.random.fold_in(keys.shared, 0x48D))

    def inner_context(context: Context) -> Context:
        size = _padded(math.prod(context.shape))
        return context.replace(keys=inner_keys(context.keys), shape=(size,))

    def init(x: jax.Array) -> Memory:
        return without_memory(codec.init(jnp.zeros(_padded(x.size))), "rotated")

    def measure(context: Context, x: jax.Array) -> PyTree:
        return codec.measure(inner_context(context), _rotate(context.keys.shared, x))

    def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        return codec.encode(inner_context(context), _rotate(context.keys.shared, x))

    def decode(context: Context, payload: PyTree) -> jax.Array:
        mean = codec.decode(inner_context(context), payload)
        return _rotate_back(context.keys.shared, mean, context.shape)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        y = _rotate(context.keys.shared, x)
        diagnostics = codec.diagnose(inner_context(context), y, after)
        if diagnostics.target is y:  # Rotating `y` back would add rounding errors.
            return diagnostics._replace(target=x)
        target = _rotate_back(context.keys.shared, diagnostics.target, context.shape)
        return diagnostics._replace(target=target)

    return codec.replace(
        init=init,
        measure=measure,
        encode=encode,
        decode=decode,
        combine=combined_with(codec.combine, inner_keys),
        diagnose=diagnose,
        layout="concatenated",
        claims=bounds_at(codec.claims, lambda size, workers: (_padded(size), workers)),
        drop_overflow=codec.drop_overflow and rotated(codec.drop_overflow),
    )


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


@checked
def cosine(codec: Codec, block_size: Annotated[int, Range(least=1, most=MOST)] = 64) -> Codec:
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
        return without_memory(codec.init(jnp.zeros(size)), "cosine")

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
