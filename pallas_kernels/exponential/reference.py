r"""The definition of `encode`, `decode` and `add`, in plain JAX.

A code is one byte: the sign in bit 7, and below it the exponent :math:`e` of :math:`2^{-e}`, 1 to
127, or 0 for zero. Rounding adds a random number to the mantissa, which carries into the exponent.
Every backend returns the same integers.
"""

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
    most = jnp.float32(2.0**-headroom)
    lifted = x * lift
    y = lifted * factor
    normal = (jnp.abs(x) >= SMALLEST_NORMAL) & (jnp.abs(lifted) >= SMALLEST_NORMAL)
    y = lax.clamp(-most, jnp.where(normal & (y == y), y, 0), most)
    word = lax.bitcast_convert_type(y, jnp.uint32)
    magnitude = word & jnp.uint32(0x7FFFFFFF)
    rounded = (magnitude + (noise >> 9)) >> 23
    code = (word >> 31 << 7) | (jnp.uint32(127) - rounded)
    return jnp.where(magnitude >= jnp.uint32(1 << 23), code, 0)


def magnitudes(codes: jax.Array, headroom: int, count: int) -> jax.Array:
    """The values of uint32 codes for a scale of 1, divided by `count`, float32."""
    exponent = codes & EXPONENT
    power = lax.bitcast_convert_type((jnp.uint32(127 + headroom) - exponent) << 23, jnp.float32)
    magnitude = jnp.where(exponent > 0, power, 0) * jnp.float32(1 / count)
    return jnp.where(codes >= SIGN, -magnitude, magnitude)


def add_codes(a: jax.Array, b: jax.Array, noise: jax.Array) -> jax.Array:
    """Codes, uint32, of the sums of two arrays of codes, uint32 like the `noise`."""
    exponent_a, exponent_b = ((code & EXPONENT).astype(jnp.int32) for code in (a, b))
    larger = jnp.where(exponent_a <= exponent_b, a, b)
    exponent = jnp.minimum(exponent_a, exponent_b)
    gap = jnp.abs(exponent_a - exponent_b)
    same_sign = (a ^ b) < SIGN
    # True with probability 2**-m, but never for probabilities under 2**-32.
    m = jnp.where(same_sign, gap, gap - 1)
    limit = lax.clamp(jnp.int32(1), m, jnp.int32(32))
    drawn = (noise >> (32 - limit).astype(jnp.uint32)) == 0
    moves = (m <= 0) | ((m <= 32) & drawn)
    up = jnp.maximum(jnp.where(moves, exponent - 1, exponent), 1)
    down = jnp.where(moves, exponent + 1, exponent)
    moved = jnp.where(same_sign, up, down).astype(jnp.uint32)
    both = jnp.where(same_sign | (gap > 0), (larger & SIGN) | moved, 0)
    return jnp.where(a == 0, b, jnp.where(b == 0, a, both))


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
