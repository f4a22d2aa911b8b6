"""Division that rounds the same way on every backend.

XLA divides float32 on a GPU by `div.full`, which is off by up to two units in the last place, and
on a TPU by a reciprocal. A factor computed in this way would change codes. Integer division is
exact on every backend.
"""

import jax
import jax.numpy as jnp
from jax import lax

_LEADING = 1 << 23  # The leading bit of a mantissa, which float32 does not store.


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The biased exponent, int32, and the mantissa, uint32 in [2**23, 2**24)."""
    word = lax.bitcast_convert_type(x, jnp.uint32)
    return (word >> 23).astype(jnp.int32), (word & (_LEADING - 1)) | _LEADING


def divide(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """The quotient of positive normal float32 arrays of one shape, rounded to the nearest.

    The result is arbitrary if the quotient is not a normal number, and for other arguments.
    """
    upper, dividend = _split(numerator)
    lower, divisor = _split(denominator)
    smaller = dividend < divisor
    dividend = jnp.where(smaller, dividend << 1, dividend)
    exponent = upper - lower + jnp.where(smaller, 126, 127)
    # floor(2**24 dividend / divisor): the mantissa, and one more digit for rounding.
    quotient, remainder = jnp.ones_like(dividend), dividend - divisor
    for _ in range(3):  # Eight digits per round: a divisor has 24, so their product fits in 32.
        eight = lax.div(remainder << 8, divisor)
        remainder = (remainder << 8) - eight * divisor
        quotient = (quotient << 8) | eight
    # A quotient of two floats is never halfway between two floats.
    mantissa = (quotient >> 1) + (quotient & 1)
    # The leading bit of the mantissa, or its carry, is added to the exponent.
    word = ((exponent - 1).astype(jnp.uint32) << 23) + mantissa
    return lax.bitcast_convert_type(word, jnp.float32)
