"""Stochastic rounding to equally spaced levels between the least and the largest coordinate."""

import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._contract import Claims, Codec, Context, Diagnostics, Fast, Memory
from jaxcomm._require import Range, checked
from jaxcomm.compression._bits import Alphabet, CodesPayload, Integers, rounded_normal
from jaxcomm.compression.quantizers._dither import round_to_levels, small_peak
from pallas_kernels._dispatch import nondifferentiable
from pallas_kernels.pack import bits_for_sum, pack, unpack
from pallas_kernels.quantize.api import MOST_LEVELS

MOST_SAMPLED = 2**16


class MinMax(NamedTuple):
    """The statistics. The minimum is negated, so that a maximum over workers reduces both."""

    negated_min: Any
    max: Any


def _width(levels: int, workers: int) -> int:
    """The width in bits of a field that holds the sum of `workers` codes below `levels`."""
    if workers * (levels - 1) >= 2**32:
        most = (2**32 - 1) // workers + 1
        raise ValueError(f"At most {most} `levels` fit in 32 bits for {workers} workers.")
    return bits_for_sum(levels - 1, workers)


def _measure(context: Context, x: jax.Array) -> MinMax:
    (x,) = nondifferentiable("min_max_dither", x)
    if not x.size:
        return MinMax(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
    return MinMax(jnp.max(-x), jnp.max(x))


def _mean_level(codes: jax.Array, levels: int) -> jax.Array:
    """The level next to the mean of up to 2**16 codes, at equal strides, int32[]."""
    sample = codes[:: max(-(-codes.size // MOST_SAMPLED), 1)].astype(jnp.float32)
    mean = jnp.sum(sample) / max(sample.size, 1)
    return jnp.minimum(jnp.floor(mean + 0.5).astype(jnp.int32), levels - 1)


@checked
def min_max_dither(*, levels: Annotated[int, Range(least=2, most=MOST_LEVELS)]) -> Codec:
    r"""Stochastic rounding to :math:`k` equally spaced levels between minimum and maximum.

    .. math:: Q(x)_j = x_{\min} + \frac{x_{\max} - x_{\min}}{k - 1} \left\lfloor
              (k - 1) \frac{x_j - x_{\min}}{x_{\max} - x_{\min}} + u_j \right\rfloor,
              \qquad \mathbb{E}\, Q(x) = x

    .. math:: \mathbb{E} \|Q(x) - x\|^2 \le \frac{d\, (x_{\max} - x_{\min})^2}{4 (k - 1)^2}
              \le \frac{d}{2 (k - 1)^2} \|x\|^2

    Two levels send 1 bit per coordinate. In general 0 is not a level, so coordinates that are 0
    decode to noise. If workers share the levels (reduced over workers), codes can be summed, in
    fields of :math:`b` bits with :math:`n (k - 1) < 2^b`; the bound is then that of all :math:`n d`
    coordinates. Large coordinates widen the levels of all others. `jaxcomm.compression.rotated`
    prevents that.

    Args:
      levels: :math:`k`, the number of levels, at least 2; a Python int.

    Returns:
      An unbiased codec that states its `variance`. Its payload has :math:`\lceil \log_2 (n (k - 1)
      + 1) \rceil` bits per coordinate, as many fields as fit in a uint32 word. Its statistics are
      two float32. `combine` is `"sum"`.

    Raises:
      ValueError: If `levels` is out of range. When encoding, if no field holds the sum of codes.
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.quantizers import min_max_dither
      >>> codec, x = min_max_dither(levels=3), jnp.array([1.0, 3.0, 5.0, 3.0])
      >>> context = Context.of(x)
      >>> context = context.replace(statistics=codec.measure(context, x))
      >>> payload, _ = codec.encode(context, x)
      >>> print(codec.decode(context, payload))
      [1. 3. 5. 3.]

    References:
      Suresh et al., `Distributed Mean Estimation with Limited Communication
      <https://arxiv.org/abs/1611.00429>`_, 2017.

    Differs from the paper: codes have a fixed width. :func:`jaxcomm.compression.codes.rans` of this
    codec has the paper's variable length. Variable-length codes send differences to the mean code,
    modulo `levels`, and the mean code as one more int32.
    """

    def encode(context: Context, x: jax.Array) -> tuple[CodesPayload, Memory]:
        statistics = context.statistics
        # The scale keeps the range of huge coordinates finite; as a power of two it is exact.
        peak = jnp.maximum(statistics.max, statistics.negated_min)
        scale = jnp.where(peak > 2.0**60, jnp.float32(2.0**-64), jnp.float32(1))
        above = x * scale + statistics.negated_min * scale
        spread = statistics.max * scale + statistics.negated_min * scale
        codes = round_to_levels(above, spread, levels - 1, context.keys.private)
        packed = pack(codes.astype(jnp.uint32), bits=_width(levels, context.workers))
        return CodesPayload(packed), context.memory

    def decode(context: Context, payload: CodesPayload) -> jax.Array:
        width = _width(levels, context.workers)
        codes = unpack(payload.codes, bits=width, shape=context.shape)
        fraction = codes.astype(jnp.float32) / (context.count * (levels - 1))
        # Interpolates without forming max - min, which may be infinite.
        return context.statistics.max * fraction - context.statistics.negated_min * (1 - fraction)

    middle = (levels - 1) // 2

    def split(context: Context, payload: CodesPayload) -> tuple[jax.Array, jax.Array]:
        width = _width(levels, context.workers)
        codes = unpack(payload.codes, bits=width, shape=context.shape)
        codes = codes.ravel().astype(jnp.int32)
        # One outlier widens the range, and moves the frequent levels to its end.
        center = _mean_level(codes, levels)
        beside = codes - center
        beside = jnp.where(beside < -middle, beside + levels, beside)
        return jnp.where(beside > levels - 1 - middle, beside - levels, beside), center

    def join(context: Context, integers: jax.Array, center: jax.Array) -> CodesPayload:
        codes = integers + center
        codes = jnp.where(codes < 0, codes + levels, codes)
        codes = jnp.where(codes >= levels, codes - levels, codes)
        codes = codes.astype(jnp.uint32).reshape(context.shape)
        return CodesPayload(pack(codes, bits=_width(levels, context.workers)))

    def alphabet(context: Context) -> Alphabet:
        return Alphabet(math.prod(context.shape), -middle, levels - 1 - middle)

    def likely(size: int) -> np.ndarray | None:
        spread = (levels - 1) / 2 / small_peak(size)
        # The mean is at most half a step from the level that is the integer 0.
        return rounded_normal(-middle, levels - 1 - middle, spread, mean=0.5)

    return Codec(
        encode=encode,
        decode=decode,
        measure=_measure,
        reduce_statistics=MinMax("max", "max"),
        combine="sum",
        diagnose=lambda context, x, after: Diagnostics(x, constants={"levels": levels}),
        claims=Claims(variance=lambda size, workers: size * workers / (2 * (levels - 1) ** 2)),
        layout="shared_statistics",
        fast=Fast(integers=Integers("levels", alphabet, split, join, likely)),
    )
