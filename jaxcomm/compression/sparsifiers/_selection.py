"""Where the largest numbers are, on CPUs: a sample tells which few can be among them.

Sorting takes some 150 ns a number, marking in words of 32 bits those that reach a bound a third of
one. So a sample chooses the bound, all are compared with it, and what is exact is done with the few
that reach it. Where it lets through too few or too many, the bound is halved in on, and of equal
numbers without end the first are taken: no input makes the result inexact, only slower.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _axis
from jaxcomm._counting import total
from jaxcomm._units import LARGE
from jaxcomm.compression import _bits
from jaxcomm.compression._support import nth_set

Number: TypeAlias = Callable[[jax.Array], jax.Array]
"""Of an array the uint32 numbers below 2**32 - 1 that are compared, coordinate by coordinate."""

_SAMPLE = 2**16
_STRIDE = 16  # At least.
_MOST = np.uint32(2**32 - 1)


def mark(marks: jax.Array) -> jax.Array:
    """bool[m] as uint32[ceil(m / 32)], in order: bit j of word i is mark `32 i + j`."""
    if rest := marks.size % _bits.WORD:
        # Apart: all of them would be copied if they were filled up.
        last = jnp.pad(marks[marks.size - rest :], (0, _bits.WORD - rest))
        return jnp.concatenate([mark(marks[: marks.size - rest]), mark(last)])
    bits = jnp.uint32(1) << jnp.arange(_bits.WORD, dtype=jnp.uint32)
    return jnp.sum(jnp.where(marks.reshape(-1, _bits.WORD), bits, 0), axis=1, dtype=jnp.uint32)


def _ones(words: jax.Array) -> jax.Array:
    return lax.population_count(words).astype(jnp.int32)


def marked(words: jax.Array, room: int) -> jax.Array:
    """Where the first `room` marks are, ascending int32[room]; `32 words.size` where none is."""
    ones = _ones(words)
    ends = jnp.cumsum(ones)
    # How many words end before each mark: the number of the word that it is in.
    word = jnp.cumsum(jnp.zeros(room, jnp.int32).at[ends].add(1, mode="drop"))
    rank = lax.iota(jnp.int32, room) - (ends - ones).at[word].get(mode="clip")
    place = nth_set(words.at[word].get(mode="clip"), rank)
    return jnp.where(word < words.size, word * _bits.WORD + place, words.size * _bits.WORD)


def places(marks: jax.Array, room: int) -> jax.Array:
    """Where the first `room` true ones are, ascending int32[room]; `size` where none is."""
    size = marks.size

    def one_by_one(marks: jax.Array) -> jax.Array:
        (found,) = jnp.nonzero(marks, size=room, fill_value=size)
        return found

    if size < LARGE:
        return one_by_one(marks)
    return lax.platform_dependent(
        marks, cpu=lambda m: jnp.minimum(marked(mark(m), room), size), default=one_by_one
    )


def first_marks(words: jax.Array, wanted: jax.Array) -> jax.Array:
    """The words with no more than the first `wanted` of their marks."""
    ones = _ones(words)
    kept = jnp.clip(wanted - (jnp.cumsum(ones) - ones), 0, ones)
    below = (jnp.uint32(1) << nth_set(words, kept).astype(jnp.uint32)) - jnp.uint32(1)
    return jnp.where(kept < ones, words & below, words)


def kth_largest(numbers: jax.Array, k: jax.Array | int) -> jax.Array:
    """uint32[], the largest that `k` of the numbers reach, bit by bit."""

    def refine(step: jax.Array, least: jax.Array) -> jax.Array:
        trial = least | (jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        return jnp.where(total(numbers >= trial) >= k, trial, least)

    return lax.fori_loop(0, 32, refine, _axis.varying_like(jnp.uint32(0), numbers))


class _Plan(NamedTuple):
    stride: int  # of the sample
    rank: int  # which of the sample, from the largest, is the bound
    room: int  # for those that reach it


def _plan(size: int, k: int) -> _Plan:
    """With three standard deviations of a random sample to spare below, and four above."""
    stride = max(size // _SAMPLE, _STRIDE) | 1  # Odd: not all of one column of a matrix.
    expected = k / stride
    rank = math.ceil(expected + 3 * math.sqrt(expected)) + 1
    room = math.ceil((rank + 4 * math.sqrt(rank)) * stride)
    return _Plan(stride, min(rank, -(-size // stride)), min(room, size))


class _Bracket(NamedTuple):
    """Bounds between which the least of the largest is."""

    low: jax.Array  # uint32[]: `k` or more reach it
    high: jax.Array  # uint32[]: fewer than `k` are above it
    trial: jax.Array  # uint32[], the next to be tried, above `low`
    words: jax.Array  # uint32[ceil(size / 32)], the marks of those that reach `low`
    reach: jax.Array  # int32[], how many do
    step: jax.Array  # uint32[], the most that the trial goes up: where many are equal, it is 1


def _all(size: int) -> np.ndarray:
    """The words in which all are marked."""
    words = np.full(-(-size // _bits.WORD), _MOST)
    words[-1:] >>= np.uint32(-size % _bits.WORD)
    return words


def _candidates(x: jax.Array, k: int, number: Number, plan: _Plan) -> jax.Array:
    """The marks of `k` numbers or more, for which there is room, and the `k` largest among them."""
    zero = _axis.varying_like(jnp.uint32(0), x)

    def narrow(bracket: _Bracket) -> _Bracket:
        low, high, trial, words, reach, step = bracket
        # Else XLA takes the numbers out of the loop, and keeps them.
        here, trial = lax.optimization_barrier((x, trial))
        tried = mark(number(here) >= trial)
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
        here, low = lax.optimization_barrier((x, bracket.low))
        above, equal = mark(number(here) > low), mark(number(here) == low)
        words = above | first_marks(equal, k - total(_ones(above)))
        return bracket._replace(words=words, reach=jnp.full_like(bracket.reach, k))

    bracket = _Bracket(
        low=zero,
        high=zero | _MOST,
        trial=jnp.maximum(kth_largest(number(x[:: plan.stride]), plan.rank), 1),
        words=zero | _all(x.size),
        reach=zero.astype(jnp.int32) + x.size,
        step=zero + 1,
    )
    # Loops, since `jax.vmap` would run both branches of a conditional.
    bracket = lax.while_loop(
        lambda now: (now.reach > plan.room) & (now.low < now.high), narrow, bracket
    )
    return lax.while_loop(lambda now: now.reach > plan.room, first_of_equal, bracket).words


def take_largest(numbers: jax.Array, k: jax.Array | int) -> jax.Array:
    """Which are the `k` largest, of equal ones the first, bool[size]; 0 is none of them."""
    least = kth_largest(numbers, k)
    above, equal = numbers > least, (numbers == least) & (numbers > 0)
    return above | (equal & (jnp.cumsum(equal.astype(jnp.int32)) <= k - total(above)))


def select(x: jax.Array, k: int, number: Number) -> jax.Array:
    """Where the `k` largest numbers of `x` are, of equal ones the first; ascending uint32[k].

    Args:
      x: [size], of at least one coordinate.
      k: At least 1, at most `size`.
      number: Of coordinates, in whose order they are; taken anew wherever it is read.
    """
    plan = _plan(x.size, k)
    where = marked(_candidates(x, k, number, plan), plan.room)
    numbers = number(x.at[where].get(mode="clip")) + jnp.uint32(1)
    taken = take_largest(jnp.where(where < x.size, numbers, 0), k)
    return where[marked(mark(taken), k)].astype(jnp.uint32)
