"""The coordinates of largest magnitude: exactly, by a sample, or of each block with few bits."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import Claims, Codec, Context, Entries, Fast, Memory, scattered
from jaxcomm._require import Positive, Share, checked
from jaxcomm.compression import _bits
from jaxcomm.compression._bits import require_countable
from jaxcomm.compression._means import mean_where
from jaxcomm.compression.sparsifiers._largest import largest, places
from jaxcomm.compression.sparsifiers._sparse import (
    Count,
    IndexCode,
    Selection,
    SparsePayload,
    choose_layout,
    integers_of_indices,
    make_count,
    pack_indices,
    require_value_dtype,
    to_payload,
    unpack_indices,
)
from pallas_kernels._dispatch import nondifferentiable


def _by_sample(magnitudes: jax.Array, count: int, sample: float) -> jax.Array:
    """The `count` largest, or at least half as many of them, by a threshold from a sample.

    If too few or too many coordinates reach the threshold, the selection is exact.
    """
    size = magnitudes.size
    stride = max(int(1 / sample), 1)
    sampled = magnitudes[::stride]
    threshold = lax.top_k(sampled, max(min(round(count / stride), sampled.size), 1))[0][-1]
    above = (magnitudes >= threshold) & (magnitudes > 0)
    passed = jnp.sum(above, dtype=jnp.int32)
    capacity = min(2 * count, size)

    def among_those_above() -> jax.Array:
        found = places(above, capacity)
        _, best = lax.top_k(magnitudes.at[found].get(mode="fill", fill_value=-1), count)
        # Unused entries have the index `size`, which sorts last.
        return jnp.sort(found[best]).astype(jnp.uint32)

    close = (passed >= count // 2) & (passed >= 1) & (passed <= capacity)
    return lax.cond(close, among_those_above, lambda: largest(magnitudes, count))


def _blocks(size: int, block_size: int | None) -> tuple[int, int]:
    """The number of blocks, and the size of each."""
    width = min(block_size or size, require_countable(size))
    return (math.ceil(size / width), width) if size else (1, 0)


def _largest_of_blocks(flat: jax.Array, kept: Count, block_size: int | None) -> jax.Array:
    """The positions of the largest coordinates of each block, uint32[blocks, k]."""
    blocks, width = _blocks(flat.size, block_size)
    filled = jnp.pad(flat, (0, blocks * width - flat.size)).reshape(blocks, width)
    first = jnp.arange(blocks, dtype=jnp.uint32)[:, None] * jnp.uint32(width)
    return largest(filled, kept(width), jnp.abs) + first


@checked
def top_k(
    *,
    ratio: Share | None = None,
    k: Positive | None = None,
    block_size: Positive | None = None,
    sample_ratio: Share | None = None,
    value_dtype: Any = jnp.float32,
) -> Codec:
    r"""Sends the :math:`k` coordinates of largest magnitude.

    .. math:: C(x)_j = \begin{cases} x_j & j \in \mathrm{top}_k |x| \\ 0 & \text{otherwise}
              \end{cases}, \qquad \|C(x) - x\|^2 \le \Big(1 - \frac{k}{d}\Big) \|x\|^2

    Biased: use it inside :func:`jaxcomm.compression.feedback.error_feedback`. Payloads of different
    workers contain different coordinates, so they are gathered. An index takes about :math:`2 +
    \log_2 (d / k)` bits (8.6 at 1 %), and a value takes 32 or 16.

    Args:
      ratio: :math:`k / d`, in (0, 1]; at least one coordinate is sent.
      k: The number of coordinates, instead of `ratio`.
      block_size: Coordinates of a block. Each block sends its own :math:`k`; the last block is
        padded with zeros. Default: one block.
      sample_ratio: The fraction of the coordinates, such as 0.01, from which a threshold is
        estimated. This takes one pass instead of a sort (Lin et al., 2018). It sends between
        :math:`k / 2` and :math:`k` coordinates. If the estimated number is off by more than a
        factor of 2, it selects exactly the :math:`k` largest.
      value_dtype: float32, or bfloat16; feedback compensates its rounding.

    Returns:
      A codec that states its `contraction`. `combine` is `None`. Its derivative is that of the sent
      values, for the selection that it made.

    Raises:
      ValueError: If an option is out of range, or both `block_size` and `sample_ratio` are set.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sparsifiers import top_k
      >>> codec, x = top_k(k=2), jnp.array([1.0, -4.0, 0.5, 2.0])
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> print(codec.decode(Context.of(x), payload))
      [ 0. -4.  0.  2.]

    References:
      Aji and Heafield, `Sparse Communication for Distributed Gradient Descent
      <https://arxiv.org/abs/1704.05021>`_, 2017.
      Stich et al., `Sparsified SGD with Memory <https://arxiv.org/abs/1809.07599>`_, 2018.
    """
    kept, dtype = make_count(ratio, k), require_value_dtype(value_dtype)
    if sample_ratio is not None and block_size is not None:
        raise ValueError("`sample_ratio` cannot be combined with `block_size`.")

    def layout_of(size: int) -> IndexCode:
        blocks, width = _blocks(size, block_size)
        count = blocks * kept(width)
        # With `sample_ratio` an unused entry has the index `size`, one past the last coordinate.
        return choose_layout(
            count,
            blocks * width + (sample_ratio is not None),
            block=width if blocks > 1 else None,
            distinct=sample_ratio is None,
        )

    def choose(flat: jax.Array) -> jax.Array:
        if sample_ratio is not None and flat.size:
            return _by_sample(jnp.abs(flat), kept(flat.size), sample_ratio)
        return _largest_of_blocks(flat, kept, block_size).ravel()

    def encode(context: Context, x: jax.Array) -> tuple[SparsePayload, Memory]:
        # Otherwise XLA computes it again, in another layout, for each use in the selection.
        flat = lax.optimization_barrier(x.ravel())
        return to_payload(flat, choose(flat), layout_of(x.size), dtype), context.memory

    def entries(context: Context, payload: SparsePayload) -> Entries:
        layout = layout_of(math.prod(context.shape))
        values = payload.values.astype(jnp.float32) / context.count
        return Entries(unpack_indices(payload.indices, layout), values)

    def contraction(size: int, workers: int) -> float:
        _, width = _blocks(size, block_size)
        least = kept(width) if sample_ratio is None else max(kept(width) // 2, 1)
        # A bfloat16 keeps 8 bits of each value.
        return least / width * (1 - 2.0**-16 if dtype == jnp.bfloat16 else 1)

    are_distinct = block_size is None and sample_ratio is None
    return Codec(
        encode=encode,
        decode=scattered(entries),
        claims=Claims(contraction=contraction),
        fast=Fast(
            entries=entries,
            integers=integers_of_indices(kept, layout_of) if are_distinct else None,
            selection=Selection(
                choose=lambda shared, flat: choose(flat),
                layout=layout_of,
                drawn=False,
                value_dtype=dtype,
            ),
        ),
    )


_BITS = 2


class CoarsePayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf)."""

    indices: jax.Array  # uint32[ceil(bits / 32)], as `choose_layout` says
    codes: jax.Array  # uint32[ceil(2 entries / 32)]; bit 0: positive, bit 1: the larger magnitude
    magnitudes: jax.Array  # float32[blocks, 2], the smaller and the larger one of each block


@checked
def coarse_top_k(
    *, ratio: Share | None = None, k: Positive | None = None, block_size: Positive = 4096
) -> Codec:
    r"""Sends the k coordinates of largest magnitude of each block, and 2 bits for each value.

    .. math:: P = \mathrm{top}_k |x|, \quad \mu = \frac{1}{k} \sum_{j \in P} |x_j|, \qquad
              C(x)_j = \begin{cases} \mathrm{sign}(x_j)\, \mu_+ & j \in P, |x_j| > \mu \\
              \mathrm{sign}(x_j)\, \mu_- & j \in P, |x_j| \le \mu \\ 0 & \text{otherwise}
              \end{cases}

    where :math:`\mu_\pm` are the means of the magnitudes above :math:`\mu` and of the others. So
    :math:`C(x)` is a projection of :math:`x`, and

    .. math:: \|C(x) - x\|^2 = \|x\|^2 - \|C(x)\|^2 \le (1 - \delta) \|x\|^2, \qquad
              \delta = \min\Big(\frac{k}{b}, \frac{1}{k}\Big)

    for blocks of :math:`b` coordinates: two means keep at least as much as one, and one keeps
    :math:`k \mu^2`. A coordinate takes 2 bits and an index of about :math:`2 + \log_2 (b / k)`
    bits; a block takes two float32.

    Args:
      ratio: :math:`k / b`, in (0, 1]; at least one coordinate is sent.
      k: The number of coordinates of a block, instead of `ratio`.
      block_size: :math:`b`. The last block is padded with zeros, which are not sent as values.

    Returns:
      A biased codec that states its `contraction`. `combine` is `None`. Use it inside
      :func:`jaxcomm.compression.feedback.error_feedback`.

    Raises:
      ValueError: If an option is out of range.
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sparsifiers import coarse_top_k
      >>> codec, x = coarse_top_k(k=3), jnp.array([1.0, -8.0, 0.5, 2.0, 4.0])
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> print(codec.decode(Context.of(x), payload))
      [ 0. -8.  0.  3.  3.]

    References:
      Sarfi et al., `Communication Efficient LLM Pre-training with SparseLoCo
      <https://arxiv.org/abs/2508.15706>`_, 2025.

    Differs from the paper: blocks are runs of a flat unit, not squares of a matrix. The paper does
    not say how its 2 bits are chosen; two magnitudes of each block are our choice.
    """
    kept = make_count(ratio, k)

    def layout_of(size: int) -> IndexCode:
        blocks, width = _blocks(size, block_size)
        block = width if blocks > 1 else None
        return choose_layout(blocks * kept(width), blocks * width, block=block)

    def encode(context: Context, x: jax.Array) -> tuple[CoarsePayload, Memory]:
        (x,) = nondifferentiable("coarse_top_k", x)
        flat = lax.optimization_barrier(x.ravel())
        indices = _largest_of_blocks(flat, kept, block_size)
        values = flat.at[indices].get(mode="fill", fill_value=0)
        size, real = jnp.abs(values), indices < flat.size
        middle = mean_where(real, size, axis=-1)
        is_large = size > middle[:, None]
        magnitudes = jnp.stack(
            [mean_where(real & ~is_large, size, axis=-1), mean_where(is_large, size, axis=-1)], 1
        )
        codes = jnp.stack([values.ravel() >= 0, is_large.ravel()])
        packed = pack_indices(indices.ravel(), layout_of(x.size))
        return CoarsePayload(packed, _bits.pack_bits(codes.ravel()), magnitudes), context.memory

    def entries(context: Context, payload: CoarsePayload) -> Entries:
        layout = layout_of(math.prod(context.shape))
        blocks, _ = _blocks(math.prod(context.shape), block_size)
        codes = _bits.unpack_bits(payload.codes, _BITS * layout.entries)
        positive, is_large = codes.reshape(_BITS, layout.entries)
        small, large = jnp.repeat(
            payload.magnitudes / context.count,
            layout.entries // blocks,
            axis=0,
            total_repeat_length=layout.entries,
        ).T
        size = jnp.where(is_large, large, small)
        return Entries(unpack_indices(payload.indices, layout), jnp.where(positive, size, -size))

    def contraction(size: int, workers: int) -> float:
        _, width = _blocks(size, block_size)
        return min(kept(width) / width, 1 / kept(width))

    return Codec(
        encode=encode,
        decode=scattered(entries),
        claims=Claims(contraction=contraction),
        fast=Fast(entries=entries),
    )
