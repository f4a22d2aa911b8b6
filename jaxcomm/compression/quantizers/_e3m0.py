"""Floats of 4 bits: a sign, an exponent of 3 bits and no mantissa."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _noise
from jaxcomm._contract import Claims, Codec, Context, Memory
from jaxcomm.compression.quantizers._dither import NORMS
from pallas_kernels._dispatch import nondifferentiable
from pallas_kernels.pack import pack, unpack

_BITS = 4
_MANTISSA = 23
_BIAS = 127
_SIGN = 8
_POWERS = 7  # 2**0 to 2**-6; the eighth code is 0


class E3M0Payload(NamedTuple):
    """The payload of one unit (a bucket or a leaf): 4 bits per coordinate."""

    codes: jax.Array  # uint32[ceil(size / 8)]; bit 3 of a field is the sign; 0 is 0, 7 the peak


def e3m0() -> Codec:
    r"""Unbiased rounding to the largest magnitude times a power of two, in 4 bits per coordinate.

    .. math:: Q(x)_j \in \{0, \pm N, \pm 2^{-1} N, \ldots, \pm 2^{-6} N\}, \qquad N = \max |x|,
              \qquad \mathbb{E}\, Q(x) = x

    .. math:: \mathbb{E}\|Q(x) - x\|^2 \le \Big(\frac{1}{8} + \frac{n d}{2^{14}}\Big) \|x\|^2

    A coordinate is rounded to one of its two neighbors. Below the smallest power, that is 0 or this
    power, at a variance of at most :math:`2^{-14} N^2`. For large arrays, use
    `blockwise(e3m0(), 256)`, with :math:`N` of each block: the bound is then 1/8 + 1/64.

    Returns:
      A codec that states its `variance`, over `n` workers that share :math:`N`. Its payload has 4
      bits per coordinate, and its statistic is one float32. `combine` is `None`, because sums of
      powers of two are no powers of two: receivers add in float32.

    Raises:
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.quantizers import e3m0
      >>> codec, x = e3m0(), jnp.array([6.0, -1.5, 0.0])
      >>> context = Context.of(x)
      >>> context = context.replace(statistics=codec.measure(context, x))
      >>> payload, _ = codec.encode(context, x)
      >>> print(codec.decode(context, payload))
      [ 6.  -1.5  0. ]

    References:
      Douillard et al., `Streaming DiLoCo with Overlapping Communication
      <https://arxiv.org/abs/2501.18512>`_, 2025, for outer gradients in this format.

    Differs from the paper: powers are relative to the largest magnitude, and rounding is unbiased.
    The paper states neither a scale nor a rounding.
    """
    norm = NORMS["max"]

    def encode(context: Context, x: jax.Array) -> tuple[E3M0Payload, Memory]:
        (x,) = nondifferentiable("e3m0", x)
        flat, peak = x.ravel(), context.statistics.max_abs
        # XLA multiplies by the reciprocal, which is 0 for the largest numbers if not scaled before.
        mantissa, exponent = jnp.frexp(jnp.where(peak > 0, peak, 1))
        share = jnp.where(peak > 0, jnp.ldexp(jnp.abs(flat), -exponent) / mantissa, 0)
        words = lax.bitcast_convert_type(jnp.minimum(share, 1), jnp.uint32)
        noise = _noise.bits(context.coins.private, flat.shape)
        # Noise carries from the mantissa into the exponent, as in natural compression.
        carried = (words + (noise >> (32 - _MANTISSA))) >> _MANTISSA
        least = _BIAS - (_POWERS - 1)
        rounded = carried.astype(jnp.int32) - (least - 1)
        # Below the smallest power, its share of that power is the probability of it.
        uniform = (noise >> 8).astype(jnp.float32) * 2.0**-24
        is_small = share < 2.0 ** -(_POWERS - 1)
        code = jnp.where(
            is_small, (uniform < share * 2.0 ** (_POWERS - 1)).astype(jnp.int32), rounded
        )
        signed = code.astype(jnp.uint32) | jnp.where((flat < 0) & (code > 0), _SIGN, 0).astype(
            jnp.uint32
        )
        return E3M0Payload(pack(signed, bits=_BITS)), context.memory

    def decode(context: Context, payload: E3M0Payload) -> jax.Array:
        signed = unpack(payload.codes, bits=_BITS, shape=(math.prod(context.shape),))
        code = (signed & jnp.uint32(_SIGN - 1)).astype(jnp.float32)
        power = jnp.where(code > 0, jnp.exp2(code - float(_POWERS)), 0) / context.count
        size = power * context.statistics.max_abs
        return jnp.where(signed >= _SIGN, -size, size).reshape(context.shape)

    return Codec(
        encode=encode,
        decode=decode,
        measure=lambda context, x: norm.measure(*nondifferentiable("e3m0", x)),
        reduce_statistics=norm.reduce_statistics,
        claims=Claims(variance=lambda size, workers: 1 / 8 + size * workers / 2**14),
        layout="shared_statistics",
    )
