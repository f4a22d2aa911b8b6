"""Sparsifiers that keep what they do not send: AdaComp's bins, and gradients above their noise."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import Codec, Context, Diagnostics, Entries, Fast, Memory, scattered
from jaxcomm._require import AboveZero, Positive, Share, checked
from jaxcomm.compression import _bits
from jaxcomm.compression._bits import MOST, require_countable
from jaxcomm.compression._means import peak
from jaxcomm.compression._overflow import Overflow, diagnose_overflow
from jaxcomm.compression.feedback._loop import FeedbackMemory
from jaxcomm.compression.sparsifiers._sparse import (
    layout_with_unused,
    make_count,
    pack_indices,
    select,
    to_dense,
    unpack_indices,
)
from pallas_kernels._dispatch import nondifferentiable


def _diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
    return diagnose_overflow(context, context.memory.own.kept + x, after)


class AdaCompPayload(NamedTuple):
    """The payload of one unit: up to `capacity` coordinates of each bin, and one magnitude."""

    symbols: jax.Array  # uint32[words], packed: 0 for none, or 1 + 2 index + (negative)
    scale: jax.Array  # float32[]


@checked
def ada_comp(*, block_size: Positive = 500, capacity: Positive = 5) -> Codec:
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

    return Codec(encode=encode, decode=decode, init=init, diagnose=_diagnose, scope="leaf")


ORDERS = 7  # the largest difference to the largest exponent that 3 bits encode
WIDTH = 4  # bits of a sign and an exponent difference


class VariancePayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf)."""

    indices: jax.Array  # uint32[ceil(bits / 32)], as `choose_layout` says
    codes: jax.Array  # uint32[ceil((4 k + 8) / 32)]: the largest exponent in 8 bits, k codes in 4


class VarianceMemory(NamedTuple):
    """The memory besides the accumulated gradient, in `FeedbackMemory`."""

    deviation: jax.Array  # float32 like x, the square root of v


def _exponents(magnitudes: jax.Array) -> jax.Array:
    """Biased exponents of the nearest powers of two, as float32 stores them, uint32."""
    words = lax.bitcast_convert_type(magnitudes, jnp.uint32)
    return (words + jnp.uint32(1 << 22)) >> 23


def _power_of_two(exponents: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(exponents << 23, jnp.float32)


@checked
def variance_based(
    *,
    alpha: AboveZero = 1.0,
    decay: Share = 0.999,
    ratio: Share | None = None,
    k: Positive | None = None,
) -> Codec:
    r"""Sends coordinates whose accumulated gradient is larger than its noise.

    .. math:: r \gets r + x, \qquad v \gets v + x^2, \qquad
              \text{send } j \text{ where } r_j^2 > \alpha v_j

    Where :math:`j` is sent, :math:`r_j` keeps the rounding error and :math:`v_j \gets 0`. Elsewhere
    :math:`v_j \gets \zeta v_j`. Gradients that are consistent from step to step are sent after
    about :math:`\alpha` steps. Gradients that change sign are seldom sent. Values are rounded to
    powers of two; 3 bits encode the eight largest, and smaller ones wait. Sends 4 bits per value,
    an index of about :math:`2 + \log_2 (d / k)` bits for each, and one byte.

    The capacity is fixed at trace time. Coordinates over the capacity wait, and `diagnostics=True`
    reports their number as `overflow`. :math:`r` is the residual, so do not wrap the codec in error
    feedback. No error bound is known.

    Args:
      alpha: :math:`\alpha > 0`; the paper takes 1 to 2. Below 1 the first step already sends.
      decay: :math:`\zeta` in (0, 1], the factor per step by which old noise decays.
      ratio: :math:`k / d`, in (0, 1]; the capacity is at least one coordinate. The largest
        :math:`|r|` have priority.
      k: The capacity in coordinates, instead of `ratio`.

    Returns:
      A codec that keeps two arrays like `x` on each worker, :math:`r` and :math:`\sqrt v`.
      `combine` is `None`.

    Raises:
      ValueError: If an option is out of range.
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.sparsifiers import variance_based
      >>> codec = variance_based(k=2)
      >>> memory = codec.init(jnp.zeros(2))
      >>> for x in (jnp.array([1.0, 1.0]), jnp.array([1.0, -1.0])):
      ...     payload, memory = codec.encode(Context.of(x, memory=memory), x)
      ...     print(codec.decode(Context.of(x), payload), memory.own.kept)
      [0. 0.] [1. 1.]
      [2. 0.] [0. 0.]

    References:
      Tsuzuku et al., `Variance-based Gradient Compression for Efficient Distributed Deep Learning
      <https://arxiv.org/abs/1802.06058>`_, 2018.

    Differs from the paper: :math:`v` adds the squares of a step's mean gradient, and the
    paper adds those of each sample divided by the batch size. Here a step is one micro-batch, and
    :math:`\alpha` counts steps. The rounding error stays in :math:`r`, which the paper sets to 0,
    so nothing is lost. The capacity is limited. The powers of two are relative to the largest of a
    layer. The codec keeps :math:`\sqrt v`, which does not overflow.
    """
    kept = make_count(ratio, k)

    layout_of = layout_with_unused(kept)

    def init(x: jax.Array) -> Memory:
        return Memory(FeedbackMemory(jnp.zeros_like(x), VarianceMemory(jnp.zeros_like(x))))

    def encode(context: Context, x: jax.Array) -> tuple[VariancePayload, Memory]:
        own = context.memory.own
        residual, deviation, x = nondifferentiable(
            "variance_based", own.kept, own.inner.deviation, x
        )
        # Otherwise XLA computes them again for each use.
        total, deviation = lax.optimization_barrier(
            ((residual + x).ravel(), jnp.hypot(deviation, x).ravel())
        )
        flat, magnitudes = total.astype(jnp.float32), jnp.abs(total).astype(jnp.float32)
        significant = jnp.abs(total) > alpha**0.5 * deviation
        # The largest exponent is rounded down, so that no value sent exceeds the largest magnitude.
        largest = peak(jnp.where(significant, magnitudes, 0))
        top = lax.bitcast_convert_type(largest, jnp.uint32) >> 23
        exponents = jnp.minimum(_exponents(magnitudes), top)
        wanted = significant & (exponents + jnp.uint32(ORDERS) >= top) & (exponents > 0)
        indices, overflow = select(flat, wanted, kept(x.size), jnp.abs)
        below = top - exponents.at[indices].get(mode="fill", fill_value=0)
        negative = flat.at[indices].get(mode="fill", fill_value=0) < 0
        codes = (below & jnp.uint32(ORDERS)) | (negative.astype(jnp.uint32) << 3)
        head = jnp.stack([top & jnp.uint32(15), top >> 4])
        payload = VariancePayload(
            pack_indices(indices, layout_of(x.size)),
            _bits.pack_numbers(jnp.concatenate([head, codes]), WIDTH),
        )
        # The values that receivers decode.
        sent, values = entries(context.received(), payload)
        residual = total.at[sent].add(-values.astype(x.dtype), mode="drop")
        waiting = decay**0.5 * deviation.at[sent].set(0, mode="drop")
        after = FeedbackMemory(residual.reshape(x.shape), VarianceMemory(waiting.reshape(x.shape)))
        return payload, Memory(after, report=Overflow(overflow))

    def entries(context: Context, payload: VariancePayload) -> Entries:
        layout = layout_of(math.prod(context.shape))
        numbers = _bits.unpack_numbers(payload.codes, WIDTH, layout.entries + 2)
        top, codes = numbers[0] + (numbers[1] << 4), numbers[2:]
        values = _power_of_two(top - (codes & jnp.uint32(ORDERS))) / context.count
        signed = jnp.where(codes >> 3 == 1, -values, values)
        return Entries(unpack_indices(payload.indices, layout), signed)

    return Codec(
        encode=encode,
        decode=scattered(entries),
        init=init,
        diagnose=_diagnose,
        scope="leaf",
        fast=Fast(entries=entries),
    )
