"""The coordinates of largest magnitude of each block, with values of 2 bits."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import Claims, Codec, Context, Entries, Fast, Memory, scattered
from jaxcomm.compression import _bits
from jaxcomm.compression._bits import require_countable
from jaxcomm.compression._means import mean_where
from jaxcomm.compression.sparsifiers._indices import (
    IndexCode,
    choose_layout,
    pack_indices,
    unpack_indices,
)
from jaxcomm.compression.sparsifiers._largest import largest
from jaxcomm.compression.sparsifiers._sparse import make_count
from pallas_kernels._dispatch import nondifferentiable

_BITS = 2


class CoarsePayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf)."""

    indices: jax.Array  # uint32[ceil(bits / 32)], as `choose_layout` says
    codes: jax.Array  # uint32[ceil(2 entries / 32)]; bit 0: positive, bit 1: the larger magnitude
    magnitudes: jax.Array  # float32[blocks, 2], the smaller and the larger one of each block


def coarse_top_k(
    *, ratio: float | None = None, k: int | None = None, block_size: int = 4096
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
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
        raise ValueError(f"`block_size` must be a Python int of at least 1, got {block_size!r}.")

    def blocks_of(size: int) -> tuple[int, int]:
        """The number of blocks, and the size of each."""
        width = min(block_size, require_countable(size))
        return (math.ceil(size / width), width) if size else (1, 0)

    def layout_of(size: int) -> IndexCode:
        blocks, width = blocks_of(size)
        block = width if blocks > 1 else None
        return choose_layout(blocks * kept(width), blocks * width, block=block)

    def encode(context: Context, x: jax.Array) -> tuple[CoarsePayload, Memory]:
        (x,) = nondifferentiable("coarse_top_k", x)
        blocks, width = blocks_of(x.size)
        flat = lax.optimization_barrier(x.ravel())
        filled = jnp.pad(flat, (0, blocks * width - flat.size)).reshape(blocks, width)
        first = jnp.arange(blocks, dtype=jnp.uint32)[:, None] * jnp.uint32(width)
        indices = largest(filled, kept(width), jnp.abs) + first  # uint32[blocks, k]
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
        blocks, _ = blocks_of(math.prod(context.shape))
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
        _, width = blocks_of(size)
        return min(kept(width) / width, 1 / kept(width))

    return Codec(
        encode=encode,
        decode=scattered(entries),
        claims=Claims(contraction=contraction),
        fast=Fast(entries=entries),
    )
