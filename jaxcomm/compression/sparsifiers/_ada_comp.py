"""Adaptive residual gradient compression: the largest coordinates of each bin."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import Codec, Context, Diagnostics, Memory
from jaxcomm.compression import _bits
from jaxcomm.compression._bits import MOST, require_countable
from jaxcomm.compression._overflow import Overflow, overflow_totals
from jaxcomm.compression.feedback._loop import FeedbackMemory
from jaxcomm.compression.sparsifiers._sparse import to_dense
from pallas_kernels._dispatch import nondifferentiable


class AdaCompPayload(NamedTuple):
    """The payload of one unit: up to `capacity` coordinates of each bin, and one magnitude."""

    symbols: jax.Array  # uint32[words], packed: 0 for none, or 1 + 2 index + (negative)
    scale: jax.Array  # float32[]


def _require_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`{name}` must be a Python int of at least 1, got {value!r}.")


def ada_comp(*, block_size: int = 500, capacity: int = 5) -> Codec:
    r"""Sends the coordinates close to the largest accumulated magnitude of their bin.

    .. math:: G = e + x, \qquad H = G + x, \qquad g_b = \max_{j \in b} |G_j|, \qquad
              C_j = \begin{cases} \mathrm{sgn}(G_j) \, \bar g & |H_j| \ge g_{b(j)} \\
              0 & \text{otherwise} \end{cases}, \qquad e \gets G - C

    where :math:`b` are bins of `block_size` coordinates, :math:`\bar g` the mean of :math:`g_b`
    over all bins, and :math:`e` the residual. A coordinate is sent if another step like this one
    would raise it to at least the largest magnitude of its bin, so the data determine the number
    sent.
    Sends :math:`\lceil \log_2 (2 \cdot \text{block\_size} + 1) \rceil` bits (index, sign, or none)
    for each of `capacity` entries of each bin, and 4 bytes.

    The capacity is fixed at trace time. Coordinates over the capacity stay in the residual, and
    `diagnostics=True` reports their number as `overflow`. The codec keeps the residual itself, so
    do not wrap it in error feedback. No error bound is known.

    Args:
      block_size: The number of coordinates of a bin. The paper takes 50 for convolutions and 500
        for other layers.
      capacity: The largest number of coordinates sent per bin; those of largest :math:`|H|` have
        priority. The default is close to the paper's compression rates: 40 for bins of 50 and 200
        for bins of 500.

    Returns:
      A codec that keeps one array like `x` on each worker. `combine` is `None`.

    Raises:
      ValueError: If an option is out of range.
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sparsifiers import ada_comp
      >>> codec, x = ada_comp(block_size=3), jnp.array([1.0, -4.0, 3.0, 0.0, 2.0, 0.5])
      >>> context = Context.of(x, memory=codec.init(x))
      >>> payload, memory = codec.encode(context, x)
      >>> print(codec.decode(context, payload), memory.own.kept)
      [ 0. -3.  3.  0.  3.  0.] [ 1.  -1.   0.   0.  -1.   0.5]

    References:
      Chen et al., `AdaComp: Adaptive Residual Gradient Compression for Data-Parallel Distributed
      Training <https://arxiv.org/abs/1712.02679>`_, 2018.

    Differs from the paper: the capacity of each bin is limited. A symbol takes the bits it needs,
    instead of 8 or 16.
    """
    _require_positive("block_size", block_size)
    _require_positive("capacity", capacity)

    def bins_of(size: int) -> tuple[int, int, int]:
        """The number of bins, the size of each, and the number of entries sent for each."""
        width = max(min(block_size, size), 1)
        entries = min(capacity, width)
        bits = entries * (2 * width).bit_length()  # Of one bin; at most 2**32 bits can be packed.
        require_countable(size, min(MOST, (2**32 - 1) // bits * width))
        return -(-size // width), width, entries

    def init(x: jax.Array) -> Memory:
        return Memory(FeedbackMemory(jnp.zeros_like(x), ()))

    def encode(context: Context, x: jax.Array) -> tuple[AdaCompPayload, Memory]:
        before, x = nondifferentiable("ada_comp", context.memory.own.kept, x)
        bins, width, entries = bins_of(x.size)
        fill = (0, bins * width - x.size)
        update = jnp.pad(x.ravel(), fill).reshape(bins, width)
        total = jnp.pad((before + x).ravel(), fill).reshape(bins, width)
        ahead = jnp.abs(total / 2 + update / 2)  # Halves, since sums of huge ones overflow.
        peaks = jnp.max(jnp.abs(total), axis=1)
        # Divides before adding, since the sum of huge peaks may overflow.
        scale = jnp.sum(peaks / max(bins, 1)).astype(jnp.float32)
        wanted = (ahead >= peaks[:, None] / 2) & (total != 0)
        best, indices = lax.top_k(jnp.where(wanted, ahead, -1), entries)
        negative = jnp.take_along_axis(total, indices, axis=1) < 0
        symbols = 1 + 2 * indices.astype(jnp.uint32) + negative.astype(jnp.uint32)
        sent = jnp.where(best >= 0, symbols, jnp.uint32(0)).ravel()
        payload = AdaCompPayload(_bits.pack_numbers(sent, (2 * width).bit_length()), scale)
        decoded = decode(context.received(), payload)
        overflow = jnp.sum(wanted, dtype=jnp.int32) - jnp.sum(best >= 0, dtype=jnp.int32)
        kept = before + x - decoded.astype(x.dtype)
        return payload, Memory(FeedbackMemory(kept, ()), report=Overflow(overflow))

    def decode(context: Context, payload: AdaCompPayload) -> jax.Array:
        size = math.prod(context.shape)
        bins, width, entries = bins_of(size)
        packed = _bits.unpack_numbers(payload.symbols, (2 * width).bit_length(), bins * entries)
        used, code = packed > 0, jnp.where(packed > 0, packed - 1, 0)
        first = jnp.arange(bins * entries, dtype=jnp.uint32) // entries * jnp.uint32(width)
        signed = jnp.where((code & jnp.uint32(1)) == 1, -payload.scale, payload.scale)
        values = jnp.where(used, signed, 0) / context.count
        return to_dense(values, first + (code >> 1), context.shape)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        target = context.memory.own.kept + x
        return Diagnostics(target, totals=overflow_totals(after))

    return Codec(
        encode=encode,
        decode=decode,
        init=init,
        diagnose=diagnose,
        scope="leaf",
    )
