r"""The definition of `encode`, `decode` and `add`, in plain JAX.

A code is one byte: the sign in bit 7, and below it the exponent :math:`e` of :math:`2^{-e}`, 1 to
127, or 0 for zero. Rounding adds a random number to the mantissa, which carries into the exponent.
Every backend returns the same integers.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _hash
from pallas_kernels.quantize.reference import SMALLEST_NORMAL, divide

SIGN = 0x80
EXPONENT = 0x7F


def factors(scale: jax.Array, headroom: int) -> tuple[jax.Array, jax.Array]:
    """Two factors, float32[]: their product with x is `-x 2**(1-headroom) / scale`; 0 for scale 0.

    With one factor, the reciprocal of a tiny scale would overflow, and that of a huge scale would
    be subnormal. For infinity and NaN the product is 0.
    """
    lift = jnp.where(scale >= 2.0**60, jnp.float32(2.0**-64), jnp.float32(1))
    lift = jnp.where(scale < 2.0**-60, jnp.float32(2.0**64), lift)
    usable = (scale >= SMALLEST_NORMAL) & jnp.isfinite(scale)
    most = jnp.full_like(scale, 2.0 ** (1 - headroom))
    return lift, jnp.where(usable, -divide(most, scale * lift), 0)


def _rounded(y: jax.Array, most: float, noise: jax.Array) -> jax.Array:
    """Codes, uint32, of float32 `y`: -2 times what they stand for, clipped to the power `most`.

    The negative of a code, as a byte, is the sign and the last seven bits of the exponent of y.
    """
    magnitude = lax.bitcast_convert_type(jnp.minimum(jnp.abs(y), most), jnp.uint32)
    exponent = (magnitude + (noise >> 9)) >> 23
    sign = (lax.bitcast_convert_type(y, jnp.uint32) >> 24) & SIGN
    return -(sign | exponent) & 0xFF


def round_to_powers(
    x: jax.Array, lift: jax.Array, factor: jax.Array, noise: jax.Array, headroom: int
) -> jax.Array:
    """Codes, uint32, of float32 `x` and uint32 `noise` of one shape.

    NaN has the code 0. So does a number that is subnormal at any step, because some backends flush
    it.
    """
    y = x * lift * factor
    # Below this one, x or an intermediate result is subnormal. NaN is not above it.
    tiny = jnp.float32(SMALLEST_NORMAL)
    least = jnp.maximum(2 * tiny, tiny * jnp.maximum(lift, 1) * -factor)
    kept = jnp.where(jnp.abs(y) >= least, y, 0)
    return _rounded(kept, 2.0 ** (1 - headroom), noise)


def magnitudes(codes: jax.Array, headroom: int, count: int) -> jax.Array:
    """The values of uint32 codes for a scale of 1, divided by `count`, float32."""
    exponent = codes & EXPONENT
    power = lax.bitcast_convert_type((jnp.uint32(127 + headroom) - exponent) << 23, jnp.float32)
    magnitude = jnp.where(exponent > 0, power, 0) * jnp.float32(1 / count)
    return jnp.where(codes >= SIGN, -magnitude, magnitude)


def _powers(codes: jax.Array) -> jax.Array:
    """-2 times the values of uint32 codes, float32: no sum or difference of two is subnormal."""
    # An arithmetic shift leaves a copy of the sign above the seven bits of the exponent.
    shifted = lax.bitcast_convert_type(-codes << 24, jnp.int32) >> 1
    return lax.bitcast_convert_type(shifted & ~(1 << 30), jnp.float32)


def add_codes(a: jax.Array, b: jax.Array, noise: jax.Array) -> jax.Array:
    """Codes, uint32, of the sums of two arrays of codes, uint32 like the `noise`."""
    return _rounded(_powers(a) + _powers(b), 1.0, noise)


def encode(x: jax.Array, scale: jax.Array, seeds: jax.Array, *, headroom: int) -> jax.Array:
    """The codes of `x`, uint8 of its shape."""
    noise = _hash.bits(_hash.positions(x.shape), seeds[0], seeds[1])
    lift, factor = factors(scale, headroom)
    return round_to_powers(x.astype(jnp.float32), lift, factor, noise, headroom).astype(jnp.uint8)


def decode(codes: jax.Array, scale: jax.Array, *, headroom: int, count: int) -> jax.Array:
    """The mean of `count` arrays from the codes of their sum, float32 of the same shape."""
    return magnitudes(codes.astype(jnp.uint32), headroom, count) * scale


def add(a: jax.Array, b: jax.Array, seeds: jax.Array) -> jax.Array:
    """The codes of the sums, uint8 of the same shape."""
    noise = _hash.bits(_hash.positions(a.shape), seeds[0], seeds[1])
    return add_codes(a.astype(jnp.uint32), b.astype(jnp.uint32), noise).astype(jnp.uint8)
