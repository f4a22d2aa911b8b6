r"""The definition of `encode` and `decode`, in plain JAX.

Scales are powers of two, so products with them are exact. A word has an element in its highest 8
bits, and the digits that rounding drops below them: those of a float are the bits of the float32
number, shifted. Numbers of a few digits are added in float32, correctly rounded on every backend.
Therefore every backend returns the same bytes.

A format of one element is a sign and a magnitude of 7 bits:

.. math:: |y| = n\, 2^{q}, \qquad q = \max(\lfloor \log_2 |y| \rfloor, e_{\min}) - m

with n below :math:`2^{m + 1}`. For floats, m is the number of mantissa bits. int8 has one exponent
only, so :math:`q = 0`. The 7 bits of a float are :math:`(q - q_{\min}) 2^m + n`, which holds for
subnormal numbers too, and where rounding n up carries into the exponent.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _hash

DIGITS = 24  # Binary digits of a word after its byte.
INFINITE = 0x7F800000  # The word of infinity; those of NaN are larger.
SMALLEST_NORMAL = 0x00800000
SIGN = -(2**31)
NONFINITE = 255  # The exponent of a block with a NaN or an infinity; it decodes to NaN.


class Format(NamedTuple):
    """One element of 8 bits."""

    largest: float  # The largest finite magnitude.
    mantissa: int  # m, binary digits after the leading one.
    least: int  # e_min, the exponent of the smallest normal number.
    is_integer: bool  # Negative numbers in two's complement; else bit 7 is the sign.

    @property
    def most(self) -> int:
        """The exponent of `largest`."""
        return math.frexp(self.largest)[1] - 1

    @property
    def fraction(self) -> int:
        """The 23 digits of `largest` after the leading one."""
        return round((self.largest / 2.0**self.most - 1) * 2**23)

    def error(self, block_size: int) -> float:
        r"""A bound on the squared error of a block, relative to the squares of its numbers.

        .. math:: \omega = 4^{-m - 1} + \frac{b u^2}{L^2}

        for the distance u of the smallest numbers and the largest number L. Half of L is below the
        largest magnitude of each block, after scaling. int8 has the second term only.
        """
        step = 2.0 ** (self.least - self.mantissa)
        relative = 0.0 if self.is_integer else 4.0 ** -(self.mantissa + 1)
        return relative + block_size * step**2 / self.largest**2


FORMATS: dict[str, Format] = {
    "int8": Format(127.0, 6, 6, True),
    "float8_e4m3fn": Format(448.0, 3, -6, False),
    "float8_e5m2": Format(57344.0, 2, -14, False),
}
"""The formats by the name of their dtype."""


def magnitudes(x: jax.Array) -> jax.Array:
    """The words of `|x|`, int32, of float32 `x`."""
    return _word(x) & jnp.int32(0x7FFFFFFF)


def exponents_of(largest_words: jax.Array, form: Format) -> jax.Array:
    """The exponents of blocks plus 127, int32, from the words of their largest magnitudes.

    The scale is the smallest power of two for which no number of the block exceeds
    `form.largest`, but a normal number.
    """
    carried = (largest_words + (0x7FFFFF - form.fraction)) >> 23
    exponent = jnp.maximum(carried - form.most, 1)
    return jnp.where(largest_words >= INFINITE, NONFINITE, exponent)


def _word(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _power_of_two(biased: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(biased << 23, jnp.float32)


def factors_of(exponents: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `round_in_block` multiplies by, and the magnitude above which numbers are not 0.

    This is below the smallest normal number, or the largest word for a block that is not finite.
    """
    zeros = jnp.where(exponents == NONFINITE, 0x7FFFFFFF, SMALLEST_NORMAL - 1)
    return _power_of_two(254 - exponents), zeros


def round_in_block(
    x: jax.Array, factor: jax.Array, zeros: jax.Array, noise: jax.Array | None, form: Format
) -> jax.Array:
    """Words, int32, whose highest 8 bits are the elements of float32 `x`.

    Args:
      x: float32.
      factor: float32, from `factors_of`, of a shape that broadcasts to that of `x`.
      zeros: int32, likewise.
      noise: uint32 random words of the shape of `x`; None rounds to nearest, ties to even.
      form: The format.
    """
    added = None if noise is None else (noise & jnp.uint32(2**DIGITS - 1)).astype(jnp.int32)
    magnitude = magnitudes(x)
    if form.is_integer:
        y = jnp.where(magnitude > zeros, x * factor, 0)
        if added is None:
            return _nearest(y, 0) << DIGITS
        return (y * jnp.float32(2.0**DIGITS)).astype(jnp.int32) + added
    y = lax.bitcast_convert_type(magnitude, jnp.float32) * factor
    y = jnp.where(magnitude > zeros, y, 0)
    word = _nearest_float(y, form) if added is None else _fixed(y, form) + added
    return word | (_word(x) & jnp.int32(SIGN))


def _nearest(y: jax.Array, exponent: int) -> jax.Array:
    """Words whose lowest 8 bits are the integer that is nearest to `y / 2**exponent`."""
    return _word(y + jnp.float32(1.5 * 2.0 ** (exponent + 23)))  # It has no digits below.


def _digits(y: jax.Array, form: Format) -> jax.Array:
    """The 7 bits of normal `y >= 0` after the sign, and DIGITS digits below them."""
    lowest = (126 + form.least) << 23  # What the exponent 0 of the format is in float32.
    return (_word(y) - lowest) << (form.mantissa + 1)


def _fixed(y: jax.Array, form: Format) -> jax.Array:
    """Those of every `y >= 0`: half of the sum has the digits of a subnormal number.

    In float32 the sum rounds to 23 digits below `2**form.least`.
    """
    return _digits(jnp.maximum(y, (y + jnp.float32(2.0**form.least)) * 0.5), form)


def _nearest_float(y: jax.Array, form: Format) -> jax.Array:
    normal = _digits(y, form)
    half = (1 << (DIGITS - 1)) - 1 + ((normal >> DIGITS) & 1)
    subnormal = _nearest(y, form.least - form.mantissa) << DIGITS
    return jnp.where(y < 2.0**form.least, subnormal, normal + half)


def to_bytes(words: jax.Array) -> jax.Array:
    """The highest 8 bits of each word, int8."""
    return (words >> DIGITS).astype(jnp.int8)


def to_elements(codes: jax.Array, dtype: str) -> jax.Array:
    """int8 as elements of the format `dtype`."""
    return lax.bitcast_convert_type(codes, jnp.dtype(dtype))


def blocks_of(x: jax.Array, block_size: int) -> jax.Array:
    """`x` of any shape as [blocks, block_size], padded with zeros."""
    flat = x.ravel()
    return jnp.pad(flat, (0, -flat.size % block_size)).reshape(-1, block_size)


def encode(
    x: jax.Array,
    seeds: jax.Array,
    *,
    dtype: str,
    block_size: int,
    stochastic: bool,
    first: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """The elements of `x`, of its shape, and the exponents of its blocks, uint8[blocks].

    `first` is the position of the first coordinate.
    """
    form = FORMATS[dtype]
    blocks = blocks_of(x.astype(jnp.float32), block_size)
    exponents = exponents_of(jnp.max(magnitudes(blocks), axis=1, initial=0), form)
    noise = None
    if stochastic:
        position = _hash.positions(blocks.shape) + jnp.uint32(first)
        noise = _hash.bits(position, seeds[0], seeds[1])
    factor, zeros = factors_of(exponents[:, None])
    codes = to_bytes(round_in_block(blocks, factor, zeros, noise, form))
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
