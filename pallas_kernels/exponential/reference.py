r"""The definition of `encode`, `decode` and `add`, in plain JAX.

A code is one byte: the sign in bit 7, and below it the exponent :math:`e` of :math:`2^{-e}`, 1 to
127, or 0 for zero. Rounding adds a random number to the mantissa, which carries into the exponent.
Every backend returns the same integers.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _hash
from pallas_kernels._division import divide

SIGN = 0x80
EXPONENT = 0x7F

SMALLEST_NORMAL = 2.0**-126


def factors(scale: jax.Array, headroom: int) -> tuple[jax.Array, jax.Array]:
    """Two factors, float32[], whose product with x is `x 2**-headroom / scale`; 0 for scale 0.

    With one factor, the reciprocal of a tiny scale would overflow, and that of a huge scale would
    be subnormal. For infinity and NaN the product is 0.
    """
    lift = jnp.where(scale >= 2.0**60, jnp.float32(2.0**-64), jnp.float32(1))
    lift = jnp.where(scale < 2.0**-60, jnp.float32(2.0**64), lift)
    usable = (scale >= SMALLEST_NORMAL) & jnp.isfinite(scale)
    most = jnp.full_like(scale, 2.0**-headroom)
    return lift, jnp.where(usable, divide(most, scale * lift), 0)


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
    least = jnp.maximum(tiny, tiny * jnp.maximum(lift, 1) * factor)
    word = lax.bitcast_convert_type(y, jnp.uint32)
    most = (127 - headroom) << 23  # As floats, so are positive numbers ordered.
    magnitude = _signed(jnp.minimum, word & jnp.uint32(0x7FFFFFFF), most)
    rounded = (magnitude + (noise >> 9)) >> 23
    code = ((word >> 24) & SIGN) | (jnp.uint32(127) - rounded)
    return jnp.where(jnp.abs(y) >= least, code, 0)


def _signed(extreme: Callable[..., jax.Array], word: jax.Array, bound: int) -> jax.Array:
    """The minimum or maximum of words below 2**31: TPUs compare signed numbers only."""
    return extreme(word.astype(jnp.int32), jnp.int32(bound)).astype(jnp.uint32)


def magnitudes(codes: jax.Array, headroom: int, count: int) -> jax.Array:
    """The values of uint32 codes for a scale of 1, divided by `count`, float32."""
    exponent = codes & EXPONENT
    power = lax.bitcast_convert_type((jnp.uint32(127 + headroom) - exponent) << 23, jnp.float32)
    magnitude = jnp.where(exponent > 0, power, 0) * jnp.float32(1 / count)
    return jnp.where(codes >= SIGN, -magnitude, magnitude)


def _powers(codes: jax.Array) -> jax.Array:
    """Float32 of uint32 codes, times 2**128: no sum or difference of two is subnormal."""
    # The sign, and below it one more of it, in place of which the exponent 255 - e has a one.
    shifted = lax.bitcast_convert_type(codes << 24, jnp.int32) >> 1
    word = (shifted ^ 0x3F800000) | 0x40000000
    return jnp.where(codes == 0, 0, lax.bitcast_convert_type(word, jnp.float32))


def add_codes(a: jax.Array, b: jax.Array, noise: jax.Array) -> jax.Array:
    """Codes, uint32, of the sums of two arrays of codes, uint32 like the `noise`."""
    word = lax.bitcast_convert_type(_powers(a) + _powers(b), jnp.uint32)
    magnitude = word & jnp.uint32(0x7FFFFFFF)
    rounded = (magnitude + (noise >> 9)) >> 23
    exponent = _signed(jnp.maximum, jnp.uint32(255) - rounded, 1)
    return jnp.where(magnitude == 0, 0, ((word >> 24) & SIGN) | exponent)


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
