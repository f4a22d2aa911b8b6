"""The support of an array: one bit for each row, block or coordinate that is not all zeros."""

import math
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis, _noise
from jaxcomm._require import Positive
from jaxcomm.compression import _bits
from jaxcomm.compression._bits import require_countable

Granularity: TypeAlias = Literal["row", "element"] | Positive
"""What one bit represents: a row (all but the first axis), an element, or a block of n elements."""


class Parts(NamedTuple):
    """The parts of an array, of equal width. The last one may be padded with zeros."""

    number: int
    width: int
    size: int


def parts_of(shape: tuple[int, ...], granularity: Granularity) -> Parts:
    """How an array of this shape is split into parts.

    Raises:
      ValueError: If `granularity` is `"row"` and the array has fewer than two axes.
    """
    size = require_countable(math.prod(shape))
    if granularity == "row":
        if len(shape) < 2:
            raise ValueError(
                f"`granularity`='row' needs an array of two axes or more, got {shape}: use `scope`="
                "'leaf', and `ownership`='cyclic' in `two_stage_mean`, or set a block length."
            )
        return Parts(shape[0], math.prod(shape[1:]), size)
    width = 1 if granularity == "element" else granularity
    return Parts(-(-size // width), width, size)


def rows_of(x: jax.Array, parts: Parts) -> jax.Array:
    """The array as [number, width], padded with zeros."""
    flat = jnp.pad(x.ravel(), (0, parts.number * parts.width - parts.size))
    return flat.reshape(parts.number, parts.width)


def bitmap(x: jax.Array, parts: Parts) -> jax.Array:
    """Whether each part has a nonzero element, uint32[ceil(number / 32)], packed as in `_bits`."""
    return _bits.pack_bits(jnp.any(rows_of(x != 0, parts), axis=1))


def count(words: jax.Array) -> jax.Array:
    """The number of set bits, int32[]."""
    return jnp.sum(lax.population_count(words), dtype=jnp.int32)


def nth_set(word: jax.Array, rank: jax.Array) -> jax.Array:
    """The position in `word` of the set bit that has `rank` set bits below it."""
    position = jnp.zeros_like(rank)
    for half in (16, 8, 4, 2, 1):
        below = lax.population_count(word & jnp.uint32(2**half - 1)).astype(jnp.int32)
        above = rank >= below
        rank = jnp.where(above, rank - below, rank)
        word = jnp.where(above, word >> half, word)
        position = jnp.where(above, position + half, position)
    return position


def members(words: jax.Array, first: jax.Array | int, capacity: int, parts: Parts) -> jax.Array:
    """The indices of `capacity` parts whose bits are set, from rank `first` on, int32[capacity].

    Ranks run through the bits of each word, word by word. `parts.number` fills the
    entries without a part, also for ranks below 0.
    """
    ones = lax.population_count(words).astype(jnp.int32)
    ends = jnp.cumsum(ones)
    starts = ends - ones
    here = (ones > 0) & (ends > first) & (starts < first + capacity)
    slot = jnp.where(here, jnp.maximum(starts - first, 0), capacity)
    index = lax.iota(jnp.int32, words.size)
    marked = jnp.zeros(capacity, jnp.int32).at[slot].set(index, mode="drop")
    word = lax.cummax(_axis.varying_like(marked, (words, first)))
    rank = first + lax.iota(jnp.int32, capacity)
    # Planar: bit j of word i is that of part j words + i.
    part = nth_set(words[word], rank - starts[word]) * words.size + word
    return jnp.where((rank >= 0) & (rank < ends[-1]), part, parts.number)


def window(words: jax.Array, shared: jax.Array, capacity: int, parts: Parts) -> jax.Array:
    """The parts whose bits are set; at most `capacity`, consecutive ones from a random one."""
    if not capacity:
        return jnp.zeros(0, jnp.int32)
    total = count(words)
    drawn = _noise.bits(shared, ())
    start = (drawn % jnp.maximum(total, 1).astype(jnp.uint32)).astype(jnp.int32)
    start = jnp.where(total > capacity, start, 0)
    chosen = members(words, start, capacity, parts)
    # The window wraps from the last part to the first.
    again = members(words, start - total, capacity, parts)
    return jnp.where(
        chosen < parts.number, chosen, jnp.where(total > capacity, again, parts.number)
    )


def real(chosen: jax.Array, parts: Parts) -> jax.Array:
    """Which entries of `chosen` name a part, for each of its coordinates, bool[k * width]."""
    return jnp.repeat(chosen < parts.number, parts.width)


def coordinates(chosen: jax.Array, parts: Parts) -> jax.Array:
    """The positions of the chosen parts' coordinates in the flat array, uint32[k * width]."""
    start = chosen.astype(jnp.uint32) * jnp.uint32(parts.width)
    return (start[:, None] + lax.iota(jnp.uint32, parts.width)[None]).ravel()


def coordinates_in(words: jax.Array, parts: Parts) -> jax.Array:
    """The number of coordinates in the parts whose bits are set, float32[]."""
    return jnp.minimum(count(words).astype(jnp.float32) * parts.width, parts.size)


def take(x: jax.Array, chosen: jax.Array, parts: Parts) -> jax.Array:
    """The values of the chosen parts, [k * width]; zeros for entries without a part."""
    return rows_of(x, parts).at[chosen].get(mode="fill", fill_value=0).ravel()


def put(values: jax.Array, chosen: jax.Array, parts: Parts, shape: tuple[int, ...]) -> jax.Array:
    """float32[shape] with these values in the chosen parts, and zeros elsewhere."""
    zeros = jnp.zeros((parts.number, parts.width), jnp.float32)
    rows = values.reshape(len(chosen), parts.width)
    dense = zeros.at[chosen].set(rows, mode="drop", unique_indices=True)
    return dense.ravel()[: parts.size].reshape(shape)
