"""Short bit strings, written to words at any bit, and words read at any bit; without loops."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class BitFields(NamedTuple):
    """Rows of bit strings; each is some zeros, then up to 32 bits, the lowest first."""

    zeros: jax.Array  # int32[rows, fields]
    bits: jax.Array  # uint32[rows, fields], 0 where `width` is 0
    width: jax.Array  # int32[rows, fields], 0 to 32


def low_bits(width: jax.Array) -> jax.Array:
    """uint32 whose lowest `width` bits are set, for widths of 0 to 31."""
    return (jnp.uint32(1) << width.astype(jnp.uint32)) - jnp.uint32(1)


def bits_of_rows(fields: BitFields) -> jax.Array:
    """The length of each row, int32[rows]."""
    return jnp.sum(fields.zeros + fields.width, axis=1, dtype=jnp.int32)


def _sums_before(x: jax.Array) -> jax.Array:
    """The sums of all earlier elements modulo 2**32, uint32[size + 1]."""
    return jnp.concatenate([jnp.zeros(1, jnp.uint32), jnp.cumsum(x, dtype=jnp.uint32)])


def write(fields: BitFields, starts: jax.Array, room: int) -> jax.Array:
    r"""Writes each row from the word `starts` on, in order, into uint32[room].

    A field lies in one word, or in two. The fields of a word are disjoint, so that

    .. math:: w_j = \sum_{i: a_i = j} \mathrm{low}_i + \sum_{i: a_i = j - 1} \mathrm{high}_i

    with :math:`a_i` the word in which field :math:`i` begins. Fields are in order, so each sum is a
    difference of two prefix sums. A scatter would take one step per field on CPUs.

    Args:
      fields: The rows.
      starts: int32[rows], the first word of each row: at least the end of the row before.
      room: The number of words. Words beyond it are dropped.
    """
    ends = jnp.cumsum(fields.zeros + fields.width, axis=1, dtype=jnp.int32)
    begins = ends - fields.width
    words = (starts[:, None] + (begins >> 5)).ravel()
    shift = (begins & 31).astype(jnp.uint32).ravel()
    bits = fields.bits.ravel()
    low = _sums_before(bits << shift)
    high = _sums_before((bits >> 1) >> (31 - shift))
    # How many fields begin in the words up to each one; none in the two words before the first.
    counts = jnp.searchsorted(words, lax.iota(jnp.int32, room), side="right", method="scan")
    until = jnp.concatenate([jnp.zeros(2, counts.dtype), counts])
    low, high = low[until], high[until]
    return (low[2:] - low[1:-1]) + (high[1:-1] - high[:-2])


def window(words: jax.Array, starts: jax.Array, bit: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The 64 bits from `bit` on of strings that begin at the words `starts`, as two uint32."""
    first, shift = starts + (bit >> 5), (bit & 31).astype(jnp.uint32)
    one, two, three = (words.at[first + i].get(mode="clip") for i in range(3))
    return (one >> shift) | ((two << 1) << (31 - shift)), (two >> shift) | (
        (three << 1) << (31 - shift)
    )


def after_zeros(low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The number of zeros at the start of 64 bits, int32, at most 31; and the 32 bits after them.

    A field has at most 31 zeros. Words that are cut off may have more, and any result.
    """
    zeros = lax.population_count((low & (~low + 1)) - 1)
    zeros = jnp.minimum(zeros, jnp.uint32(31))
    rest = (low >> zeros) | ((high << 1) << (31 - zeros))
    return zeros.astype(jnp.int32), rest
