"""Finds the positions of the largest coordinates without a copy of all of them.

A sort needs the magnitudes and as many positions, twice. Instead, the least selected magnitude is
found by counting, and the coordinates that reach it are marked by one bit each. On CPUs this is
restricted to the few coordinates above a threshold estimated from a sample.

On CPUs, sorting takes about 150 ns per number. Marking the numbers that reach a bound, in 32-bit
words, takes a third of a nanosecond per number. Therefore a sample determines the bound, all
numbers are compared with it, and the exact selection runs on the few that reach it. If too few or
too many do, the bound is found by bisection. If too many numbers are equal, the first are selected.
No input makes the result inexact, only slower.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _axis
from jaxcomm._units import LARGE
from jaxcomm.compression import _bits
from jaxcomm.compression._means import count_true, total
from jaxcomm.compression._support import Parts, count, members, nth_set

Number: TypeAlias = Callable[[jax.Array], jax.Array]
"""An elementwise function of an array to the uint32 numbers below 2**32 - 1 that are compared."""

_SAMPLE = 2**16
_STRIDE = 16  # At least.
_MOST = np.uint32(2**32 - 1)


def mark(marks: jax.Array) -> jax.Array:
    """Packs bool[m] into uint32[ceil(m / 32)] in order: bit j of word i is mark `32 i + j`."""
    if rest := marks.size % _bits.WORD:
        # The rest is packed separately: padding would copy all marks.
        last = jnp.pad(marks[marks.size - rest :], (0, _bits.WORD - rest))
        return jnp.concatenate([mark(marks[: marks.size - rest]), mark(last)])
    bits = jnp.uint32(1) << jnp.arange(_bits.WORD, dtype=jnp.uint32)
    return jnp.sum(jnp.where(marks.reshape(-1, _bits.WORD), bits, 0), axis=1, dtype=jnp.uint32)


def _ones(words: jax.Array) -> jax.Array:
    return lax.population_count(words).astype(jnp.int32)


def marked(words: jax.Array, capacity: int) -> jax.Array:
    """The positions of the first `capacity` marks, ascending; `32 words.size` if missing."""
    ones = _ones(words)
    ends = jnp.cumsum(ones)
    # The number of words that end before a mark is the index of its word.
    word = jnp.cumsum(jnp.zeros(capacity, jnp.int32).at[ends].add(1, mode="drop"))
    rank = lax.iota(jnp.int32, capacity) - (ends - ones).at[word].get(mode="clip")
    place = nth_set(words.at[word].get(mode="clip"), rank)
    return jnp.where(word < words.size, word * _bits.WORD + place, words.size * _bits.WORD)


# Traced once for leaves of one shape; `inline` leaves the program as it is.
@functools.partial(jax.jit, static_argnames="capacity", inline=True)
def places(marks: jax.Array, capacity: int) -> jax.Array:
    """The first `capacity` positions that are true, ascending, int32; `size` if missing."""
    size = marks.size

    def by_nonzero(marks: jax.Array) -> jax.Array:
        (found,) = jnp.nonzero(marks, size=capacity, fill_value=size)
        return found.astype(jnp.int32)  # int64 with `jax_enable_x64`.

    if size < LARGE:
        return by_nonzero(marks)
    return lax.platform_dependent(
        marks, cpu=lambda m: jnp.minimum(marked(mark(m), capacity), size), default=by_nonzero
    )


def first_marks(words: jax.Array, wanted: jax.Array) -> jax.Array:
    """Clears all marks but the first `wanted`."""
    ones = _ones(words)
    kept = jnp.clip(wanted - (jnp.cumsum(ones) - ones), 0, ones)
    below = (jnp.uint32(1) << nth_set(words, kept).astype(jnp.uint32)) - jnp.uint32(1)
    return jnp.where(kept < ones, words & below, words)


def kth_largest(
    numbers: jax.Array, k: jax.Array | int, count: Callable[[jax.Array], jax.Array] = total
) -> jax.Array:
    """uint32[], the `k`-th largest number, found bit by bit: a sort takes ten times as long.

    Args:
      numbers: uint32[size].
      k: At most `size`.
      count: `bool[size] -> int32[]`, the number of true elements.
    """

    def refine(step: jax.Array, least: jax.Array) -> jax.Array:
        trial = least | (jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        return jnp.where(count(numbers >= trial) >= k, trial, least)

    return lax.fori_loop(0, 32, refine, _axis.varying_like(jnp.uint32(0), numbers))


class _Sample(NamedTuple):
    stride: int  # of the sample
    rank: int  # the rank in the sample, from the largest, of the bound
    capacity: int  # for the numbers that reach the bound


def _plan(size: int, k: int) -> _Sample:
    """Leaves a margin of three standard deviations of a random sample below, and four above."""
    # Odd, so that the sample is not one column of a matrix.
    stride = max(size // _SAMPLE, _STRIDE) | 1
    expected = k / stride
    rank = math.ceil(expected + 3 * math.sqrt(expected)) + 1
    capacity = math.ceil((rank + 4 * math.sqrt(rank)) * stride)
    return _Sample(stride, min(rank, -(-size // stride)), min(capacity, size))


class _Bracket(NamedTuple):
    """The interval that contains the `k`-th largest number."""

    low: jax.Array  # uint32[], `k` or more numbers reach it
    high: jax.Array  # uint32[], fewer than `k` numbers are above it
    trial: jax.Array  # uint32[], the next bound to try, above `low`
    words: jax.Array  # uint32[ceil(size / 32)], the marks of the numbers that reach `low`
    reach: jax.Array  # int32[], how many numbers reach `low`
    step: jax.Array  # uint32[], the largest increase of the trial; 1 at first, for equal numbers


def _all_marks(size: int) -> np.ndarray:
    """Words in which all `size` marks are set."""
    words = np.full(-(-size // _bits.WORD), _MOST)
    words[-1:] >>= np.uint32(-size % _bits.WORD)
    return words


def _candidates(x: jax.Array, k: int, number: Number, plan: _Sample) -> jax.Array:
    """The marks of `k` to `plan.capacity` numbers that include the `k` largest."""
    zero = _axis.varying_like(jnp.uint32(0), x)

    def narrow(bracket: _Bracket) -> _Bracket:
        low, high, trial, words, reach, step = bracket
        # Otherwise XLA moves the numbers out of the loop and keeps them in memory.
        current, trial = lax.optimization_barrier((x, trial))
        tried = mark(number(current) >= trial)
        passed = total(_ones(tried))
        enough = passed >= k
        low, high = jnp.where(enough, trial, low), jnp.where(enough, high, trial - 1)
        return _Bracket(
            low,
            high,
            low + jnp.minimum(high - low - (high - low) // 2, jnp.where(enough, step, _MOST)),
            jnp.where(enough, tried, words),
            jnp.where(enough, passed, reach),
            jnp.minimum(step, _MOST // 4) * 4,
        )

    def first_of_equal(bracket: _Bracket) -> _Bracket:
        current, low = lax.optimization_barrier((x, bracket.low))
        above, equal = mark(number(current) > low), mark(number(current) == low)
        words = above | first_marks(equal, k - total(_ones(above)))
        return bracket._replace(words=words, reach=jnp.full_like(bracket.reach, k))

    bracket = _Bracket(
        low=zero,
        high=zero | _MOST,
        trial=jnp.maximum(kth_largest(number(x[:: plan.stride]), plan.rank), 1),
        words=zero | _all_marks(x.size),
        reach=zero.astype(jnp.int32) + x.size,
        step=zero + 1,
    )
    # Loops, since under `jax.vmap` a conditional runs both branches.
    bracket = lax.while_loop(
        lambda state: (state.reach > plan.capacity) & (state.low < state.high), narrow, bracket
    )
    return lax.while_loop(lambda state: state.reach > plan.capacity, first_of_equal, bracket).words


def take_largest(numbers: jax.Array, k: jax.Array | int) -> jax.Array:
    """Which numbers are the `k` largest, bool[size]; ties go to the first, and 0 never counts."""
    least = kth_largest(numbers, k)
    above, equal = numbers > least, (numbers == least) & (numbers > 0)
    return above | (equal & (jnp.cumsum(equal.astype(jnp.int32)) <= k - total(above)))


def select(x: jax.Array, k: int, number: Number) -> jax.Array:
    """The positions of the `k` largest numbers of `x`, ascending uint32[k]; ties go to the first.

    Args:
      x: [size], with at least one coordinate.
      k: At least 1, at most `size`.
      number: Maps coordinates to the numbers that are compared; computed again wherever it is read.
    """
    plan = _plan(x.size, k)
    where = marked(_candidates(x, k, number, plan), plan.capacity)
    numbers = number(x.at[where].get(mode="clip")) + jnp.uint32(1)
    taken = take_largest(jnp.where(where < x.size, numbers, 0), k)
    return where[marked(mark(taken), k)].astype(jnp.uint32)


Magnitude: TypeAlias = Callable[[jax.Array], jax.Array]


def first_bits(words: jax.Array, wanted: jax.Array) -> jax.Array:
    """Clears all set bits but the first `wanted`, which must be at least 1.

    Bit j of word i is that of position `j words + i`.
    """
    planes = jnp.arange(_bits.WORD, dtype=jnp.uint32)[:, None]
    sizes = jnp.sum((words[None] >> planes) & jnp.uint32(1), axis=1, dtype=jnp.int32)
    ends = jnp.cumsum(sizes)
    last = jnp.sum(ends < wanted, dtype=jnp.int32)  # The plane of the last bit to keep.
    plane = last.astype(jnp.uint32)
    last_bits = (words >> plane) & jnp.uint32(1)
    fits = jnp.cumsum(last_bits.astype(jnp.int32)) <= wanted - (ends - sizes)[last]
    before = words & ((jnp.uint32(1) << plane) - jnp.uint32(1))
    return before | jnp.where(fits, last_bits << plane, 0)


def identity(magnitudes: jax.Array) -> jax.Array:
    """The magnitudes themselves."""
    return magnitudes


def _numbers(magnitudes: jax.Array) -> jax.Array:
    """Maps magnitudes to uint32 in the same order; -1 becomes 0."""
    bits = lax.bitcast_convert_type(magnitudes, jnp.uint32)
    return jnp.where(magnitudes < 0, 0, bits + jnp.uint32(1))


def by_sort(magnitudes: jax.Array, k: int) -> jax.Array:
    """The positions of the `k` largest in each row by a sort, ascending, uint32[..., k]."""
    _, indices = lax.top_k(magnitudes, k)
    return jnp.sort(indices, axis=-1).astype(jnp.uint32)


# Traced once for leaves of one shape; `inline` leaves the program as it is.
@functools.partial(jax.jit, static_argnames="k", inline=True)
def by_threshold(magnitudes: jax.Array, k: int) -> jax.Array:
    """The same for one row, by counting."""
    numbers = _numbers(magnitudes)
    least = kth_largest(numbers, k, count_true)
    above, equal = _bits.pack_bits(numbers > least), _bits.pack_bits(numbers == least)
    chosen = above | first_bits(equal, k - count(above))
    size = magnitudes.size
    return jnp.sort(members(chosen, 0, k, Parts(size, 1, size))).astype(jnp.uint32)


@functools.partial(jax.jit, static_argnames=("k", "magnitude"), inline=True)
def by_sample(x: jax.Array, k: int, magnitude: Magnitude = identity) -> jax.Array:
    """The same for one row, by a sample; magnitudes are computed again wherever they are read."""
    return select(x, k, lambda part: _numbers(magnitude(part)))


def largest(x: jax.Array, k: int, magnitude: Magnitude = identity) -> jax.Array:
    """The positions of the `k` largest of each row, ascending uint32[..., k]; ties go to the first.

    Args:
      x: float32[..., size].
      k: At most `size`.
      magnitude: An elementwise function to the magnitudes that are compared: 0 or more, or -1 for
        coordinates that rank below all others. Computing them here, not before, saves a copy on
        CPUs.
    """
    *rows, size = x.shape
    if size < LARGE or x.size > size:
        return by_sort(magnitude(x), k)
    found = lax.platform_dependent(
        x.ravel(),
        cpu=lambda row: by_sample(row, k, magnitude),
        default=lambda row: by_threshold(magnitude(row), k),
    )
    return found.reshape(*rows, k)


def largest_of_each_sign(flat: jax.Array, k: int) -> jax.Array:
    """The positions of the `k` largest of max(x, 0) and of max(-x, 0), ascending, uint32[2, k]."""
    if flat.size < LARGE:
        # One call for both signs, since each call compiles a sort.
        return largest(jnp.maximum(jnp.stack([flat, -flat]), 0), k)
    above = largest(flat, k, lambda x: jnp.maximum(x, 0))
    return jnp.stack([above, largest(flat, k, lambda x: jnp.maximum(-x, 0))])
