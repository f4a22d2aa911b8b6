"""What a code of integers states; short bit strings in words, at prefix sums of their lengths."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import PyTree
from jaxcomm.compression._integers import Alphabet


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


BitsAt: TypeAlias = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""From a bit of each row, int32[rows], to the 64 bits from there on, as two uint32[rows]."""


PLAIN = 31
"""The parameter of a row in its plain form, a fixed number of bits per integer."""


CONSTANT = 30
"""The parameter of a row of equal integers, which has the plain form of one of them."""


class Written(NamedTuple):
    """Rows that a code has written."""

    fields: BitFields
    parameter: jax.Array  # int32[rows], 0 to 31
    table: PyTree = ()  # what all rows share, sent beside them


class Stream(NamedTuple):
    """What a receiver reads."""

    words: jax.Array  # uint32[room]
    starts: jax.Array  # int32[rows], the first word of each row
    parameter: jax.Array  # int32[rows]
    table: PyTree


class Length(NamedTuple):
    """The length in bits of the code of one of many independent integers."""

    mean: float
    variance: float


class RowCode(NamedTuple):
    """A code of rows of integers of one kind.

    Attributes:
      most: The most integers in a row: the number of sequential steps that reading takes.
      require: `alphabet -> None`, raises if the code has no words for its integers.
      write: `(int32[n, rows], alphabet) -> Written`.
      read: `(stream, n, alphabet) -> int32[n, rows]`.
      plain_words: `(n, alphabet) -> words`, the length of a row in its plain form.
      expected: `likely -> Length`, for what `Integers.likely` returns.
    """

    most: int
    require: Callable[[Alphabet], None]
    write: Callable[[jax.Array, Alphabet], Written]
    read: Callable[[Stream, int, Alphabet], jax.Array]
    plain_words: Callable[[int, Alphabet], int]
    expected: Callable[[Any], Length]


def words_of(bits: int) -> int:
    """The number of 32-bit words that hold `bits` bits."""
    return -(-bits // 32)


def plain_words(n: int, alphabet: Alphabet) -> int:
    """The words of `n` integers of a fixed width."""
    return words_of(n * alphabet.width)


def or_plain(
    fields: BitFields, parameter: jax.Array, rows: jax.Array, alphabet: Alphabet
) -> Written:
    """The rows in their plain form where the code is not shorter, or all integers are equal."""
    shape, padding = rows.shape, ((0, len(fields.bits) - len(rows)), (0, 0))
    is_constant = jnp.all(rows == rows[:1], axis=0)
    is_sent = ~is_constant[None] | (lax.broadcasted_iota(jnp.int32, shape, 0) == 0)
    plain = BitFields(
        jnp.zeros(fields.zeros.shape, jnp.int32),
        jnp.pad(jnp.where(is_sent, (rows - alphabet.low).astype(jnp.uint32), 0), padding),
        jnp.pad(jnp.where(is_sent, jnp.int32(alphabet.width), 0), padding),
    )
    fields = BitFields(*lax.optimization_barrier(tuple(fields)))
    words = (bits_of_rows(fields) + 31) >> 5
    is_plain = is_constant | (words >= plain_words(len(rows), alphabet))
    chosen = [
        jnp.where(is_plain[None], of_plain, of_code)
        for of_plain, of_code in zip(plain, fields, strict=True)
    ]
    parameter = jnp.where(is_plain, PLAIN, parameter)
    return Written(BitFields(*chosen), jnp.where(is_constant, CONSTANT, parameter))


def read_plain(low: jax.Array, alphabet: Alphabet) -> jax.Array:
    """The integer of fixed width at the start of the bits."""
    mask = low_bits(jnp.int32(alphabet.width))
    return (low & mask).astype(jnp.int32) + alphabet.low


def plain_bits(stream: Stream, alphabet: Alphabet) -> jax.Array:
    """How far a plain integer leads in each row, int32[rows]: nowhere if all are equal."""
    return jnp.where(stream.parameter == CONSTANT, 0, jnp.int32(alphabet.width))


def read_rows(
    step: Callable[[Any, BitsAt], tuple[Any, jax.Array]],
    first: Any,
    stream: Stream,
    n: int,
) -> jax.Array:
    """Reads the next integer of all rows at once, `n` times: int32[n, rows].

    Args:
      step: `(state, bits_at) -> (state, int32[rows])`; `bits_at` returns the 64 bits from a bit of
        each row on.
      first: The first state, arrays of `[rows]`.
      stream: The words.
      n: The number of integers in each row.
    """

    def bits_at(bit: jax.Array) -> tuple[jax.Array, jax.Array]:
        return window(stream.words, stream.starts, bit)

    def next_integers(state: Any, _: None) -> tuple[Any, jax.Array]:
        return step(state, bits_at)

    varying = jax.tree.map(lambda x: _axis.varying_like(x, stream), first)
    _, integers = lax.scan(next_integers, varying, None, length=n)
    return integers
