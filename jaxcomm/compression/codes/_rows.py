"""What a variable-length code states: how it writes and reads rows of integers."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import PyTree
from jaxcomm.compression._integers import Alphabet
from jaxcomm.compression.codes._bit_fields import BitFields, bits_of_rows, low_bits, window

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
