"""Floats of few bits as integers: the elements of block formats."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Format(NamedTuple):
    """Elements: a sign, and codes of magnitudes that grow with them."""

    bits: int
    mantissa: int  # binary digits after the leading one
    least: int  # the exponent of the smallest normal number
    most: int  # that of the largest number
    last: int  # the code of the largest number
    error: float  # relative to the squares of a block, with the scales of the specification


FORMATS = {
    "mxfp8_e4m3": Format(8, 3, -6, 8, 126, 1 / 60),
    "mxfp8_e5m2": Format(8, 2, -14, 15, 123, 1 / 60),
    "mxfp6_e2m3": Format(6, 3, 0, 2, 31, 1 / 64),
    "mxfp6_e3m2": Format(6, 2, -2, 4, 31, 1 / 60),
    "mxfp4": Format(4, 1, 0, 2, 7, 3 / 16),
    "mxint8": Format(8, 6, 0, 0, 127, 1 / 400),
    "nvfp4": Format(4, 1, 0, 2, 7, 1 / 8),
}


def exponent_of(x: jax.Array) -> jax.Array:
    """That of `x >= 0`, int32; -127 for numbers below the normal ones."""
    return (lax.bitcast_convert_type(x, jnp.int32) >> 23) - 127


def shifted(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """`x * 2**exponent`, also if the power itself is out of range."""
    half = exponent // 2
    powers = (half + 127) << 23, (exponent - half + 127) << 23
    first, second = (lax.bitcast_convert_type(bits, jnp.float32) for bits in powers)
    return x * first * second


def to_codes(y: jax.Array, form: Format, noise: jax.Array | None = None) -> jax.Array:
    """The codes of magnitudes, int32: to nearest, ties to even, or at random by uint32 `noise`.

    NaN has any code.
    """
    exponent = jnp.maximum(exponent_of(y), form.least)
    n = shifted(y, form.mantissa - exponent)
    rounded = jnp.round(n)
    if noise is not None:
        rounded = jnp.floor(n + (noise >> 16).astype(jnp.float32) * jnp.float32(2.0**-16))
    codes = rounded.astype(jnp.int32) + ((exponent - form.least) << form.mantissa)
    return jnp.clip(codes, 0, form.last)


def of_codes(codes: jax.Array, form: Format) -> jax.Array:
    """The magnitudes of codes, float32."""
    above = jnp.maximum(codes >> form.mantissa, 1) - 1  # exponents above the least one
    n = (codes - (above << form.mantissa)).astype(jnp.float32)
    return shifted(n, above + (form.least - form.mantissa))
