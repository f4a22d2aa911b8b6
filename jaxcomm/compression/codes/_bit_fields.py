"""Short bit strings, written to words at prefix sums of their lengths, and read at any bit."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis


class BitFields(NamedTuple):
    """Rows of bit strings, side by side; each is some zeros, then up to 32 bits, the lowest first.

    The fields of a row follow each other along the first axis, so that what runs along a row is
    one step for all rows.
    """

    zeros: jax.Array  # int32[fields, rows]
    bits: jax.Array  # uint32[fields, rows], 0 where `width` is 0
    width: jax.Array  # int32[fields, rows], 0 to 32


def low_bits(width: jax.Array) -> jax.Array:
    """uint32 whose lowest `width` bits are set, for widths of 0 to 31."""
    return (jnp.uint32(1) << width.astype(jnp.uint32)) - jnp.uint32(1)


def sums_before(x: jax.Array) -> jax.Array:
    """The sum of int32[n, rows] before each element along its row; `n - 1` steps on CPUs."""

    def by_steps(x: jax.Array) -> jax.Array:
        def add(total: jax.Array, more: jax.Array) -> tuple[jax.Array, jax.Array]:
            return total + more, total + more

        nothing = _axis.varying_like(jnp.zeros(x.shape[1], jnp.int32), x)
        return jnp.concatenate([nothing[None], lax.scan(add, nothing, x[:-1])[1]])

    # XLA for CPUs takes 60 times as long for a `cumsum`.
    return lax.platform_dependent(
        x, cpu=by_steps, default=lambda x: jnp.cumsum(x, axis=0, dtype=jnp.int32) - x
    )


def bits_of_rows(fields: BitFields) -> jax.Array:
    """The length of each row, int32[rows]."""
    return jnp.sum(fields.zeros + fields.width, axis=0, dtype=jnp.int32)


def write(fields: BitFields, starts: jax.Array, room: int) -> jax.Array:
    r"""Writes each row from the word `starts` on, in order, into uint32[room].

    A field lies in one word, or in two. The fields of a word are disjoint, so that

    .. math:: w_j = \sum_{i: a_i = j} \mathrm{low}_i + \sum_{i: a_i = j - 1} \mathrm{high}_i

    with :math:`a_i` the word in which field :math:`i` begins.

    Args:
      fields: The rows.
      starts: int32[rows], the first word of each row: at least the end of the row before.
      room: The number of words. Words beyond it are dropped.
    """
    begins = sums_before(fields.zeros + fields.width) + fields.zeros
    words = starts[None] + (begins >> 5)
    shift = (begins & 31).astype(jnp.uint32)
    low, high = fields.bits << shift, (fields.bits >> 1) >> (31 - shift)
    # XLA for CPUs would compute all of this in the loops that scatter, one field at a time.
    words, low, high = lax.optimization_barrier((words, low, high))
    nothing = jnp.zeros(room, jnp.uint32)
    return nothing.at[words].add(low, mode="drop").at[words + 1].add(high, mode="drop")


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
