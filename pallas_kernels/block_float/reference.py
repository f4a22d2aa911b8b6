r"""The definition of `encode` and `decode`, in plain JAX.

Scales are powers of two, products with them are exact, and rounding is in fixed point. Therefore
every backend returns the same bytes.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _hash
from pallas_kernels.block_float.formats import FORMATS, Format

DIGITS = 24  # Binary digits of n after the point.
INFINITE = 0x7F800000  # The word of infinity; those of NaN are larger.
SMALLEST_NORMAL = 0x00800000
NONFINITE = 255  # The exponent of a block with a NaN or an infinity; it decodes to NaN.


def magnitudes(x: jax.Array) -> jax.Array:
    """The words of `|x|`, int32, of float32 `x`; 0 for subnormal numbers."""
    word = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(0x7FFFFFFF)
    return jnp.where(word >= SMALLEST_NORMAL, word, 0)


def exponents_of(largest_words: jax.Array, form: Format) -> jax.Array:
    """The exponents of blocks plus 127, int32, from the words of their largest magnitudes.

    The scale is the smallest power of two for which no number of the block exceeds
    `form.largest`, but a normal number.
    """
    carried = (largest_words + (0x7FFFFF - form.fraction)) >> 23
    exponent = jnp.maximum(carried - form.most, 1)
    return jnp.where(largest_words >= INFINITE, NONFINITE, exponent)


def _power_of_two(biased: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(biased << 23, jnp.float32)


def round_in_block(
    x: jax.Array, exponents: jax.Array, noise: jax.Array | None, form: Format
) -> jax.Array:
    """The bytes of float32 `x`, int32, for the `exponents` of its blocks.

    Args:
      x: float32.
      exponents: int32, of a shape that broadcasts to that of `x`.
      noise: uint32 random words of the shape of `x`; None rounds to nearest, ties to even.
      form: The format.
    """
    word = magnitudes(x)
    finite = jnp.where(exponents == NONFINITE, 127, exponents)
    y = lax.bitcast_convert_type(word, jnp.float32) * _power_of_two(254 - finite)
    exponent = (lax.bitcast_convert_type(y, jnp.int32) >> 23) - 127
    above = jnp.clip(exponent, form.least, form.most) - form.least
    scaled = y * _power_of_two(127 + form.mantissa - form.least - above)
    fixed = (scaled * jnp.float32(2.0**DIGITS)).astype(jnp.int32)
    if noise is None:
        added = (1 << (DIGITS - 1)) - 1 + ((fixed >> DIGITS) & 1)
    else:
        added = (noise >> (32 - DIGITS)).astype(jnp.int32)
    code = (above << form.mantissa) + ((fixed + added) >> DIGITS)
    code = jnp.where(exponents == NONFINITE, 0, code)
    negative = lax.bitcast_convert_type(x, jnp.int32) < 0
    if form.is_integer:
        return jnp.where(negative, -code, code)
    return jnp.where(negative, code | 0x80, code)


def to_elements(codes: jax.Array, dtype: str) -> jax.Array:
    """Bytes in int32 as elements of the format `dtype`."""
    if FORMATS[dtype].is_integer:
        return codes.astype(jnp.int8)
    return lax.bitcast_convert_type(codes.astype(jnp.uint8), jnp.dtype(dtype))


def blocks_of(x: jax.Array, block_size: int) -> jax.Array:
    """`x` of any shape as [blocks, block_size], padded with zeros."""
    flat = x.ravel()
    return jnp.pad(flat, (0, -flat.size % block_size)).reshape(-1, block_size)


def encode(
    x: jax.Array, seeds: jax.Array, *, dtype: str, block_size: int, stochastic: bool
) -> tuple[jax.Array, jax.Array]:
    """The elements of `x`, of its shape, and the exponents of its blocks, uint8[blocks]."""
    form = FORMATS[dtype]
    blocks = blocks_of(x.astype(jnp.float32), block_size)
    exponents = exponents_of(jnp.max(magnitudes(blocks), axis=1, initial=0), form)
    noise = _hash.bits(_hash.positions(blocks.shape), seeds[0], seeds[1]) if stochastic else None
    codes = round_in_block(blocks, exponents[:, None], noise, form)
    elements = to_elements(codes.ravel()[: x.size].reshape(x.shape), dtype)
    return elements, exponents.astype(jnp.uint8)


def decode(elements: jax.Array, exponents: jax.Array, *, block_size: int) -> jax.Array:
    """float32 of the shape of `elements`."""
    scales = _power_of_two(exponents.astype(jnp.int32))
    scales = jnp.where(exponents == NONFINITE, jnp.float32(jnp.nan), scales)
    values = blocks_of(elements.astype(jnp.float32), block_size) * scales[:, None]
    # The largest float32 may be rounded up to 2**128.
    largest = jnp.finfo(jnp.float32).max
    values = jnp.clip(values, -largest, largest)
    return values.ravel()[: math.prod(elements.shape)].reshape(elements.shape)
