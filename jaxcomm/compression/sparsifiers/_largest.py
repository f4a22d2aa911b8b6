"""Where the largest coordinates are, without copies of all of them.

A sort takes the magnitudes and as many positions twice over. The least magnitude that is taken can
be found by counting, and the coordinates that reach it marked in one bit each; on CPUs among the
few that a sample's threshold lets through.
"""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._units import LARGE
from jaxcomm.compression import _bits
from jaxcomm.compression._support import Parts, count, members
from jaxcomm.compression.sparsifiers._selection import select

Magnitude: TypeAlias = Callable[[jax.Array], jax.Array]


def kth_largest(numbers: jax.Array, k: int) -> jax.Array:
    """uint32[], the largest that `k` of them reach, bit by bit: a sort would take ten times it."""

    def refine(step: jax.Array, least: jax.Array) -> jax.Array:
        trial = least | (jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        return jnp.where(jnp.sum(numbers >= trial, dtype=jnp.int32) >= k, trial, least)

    # Zero, of the type of what it becomes: it may differ by worker.
    return lax.fori_loop(0, 32, refine, numbers[0] & jnp.uint32(0))


def first_bits(words: jax.Array, wanted: jax.Array) -> jax.Array:
    """The words with no more than the first `wanted` bits that are set, at least one.

    Bit j of word i is that of position `j words + i`.
    """
    planes = jnp.arange(_bits.WORD, dtype=jnp.uint32)[:, None]
    sizes = jnp.sum((words[None] >> planes) & jnp.uint32(1), axis=1, dtype=jnp.int32)
    ends = jnp.cumsum(sizes)
    last = jnp.sum(ends < wanted)  # The plane of the last one.
    plane = last.astype(jnp.uint32)
    of_last = (words >> plane) & jnp.uint32(1)
    fits = jnp.cumsum(of_last.astype(jnp.int32)) <= wanted - (ends - sizes)[last]
    before = words & ((jnp.uint32(1) << plane) - jnp.uint32(1))
    return before | jnp.where(fits, of_last << plane, 0)


def as_it_is(magnitudes: jax.Array) -> jax.Array:
    """The magnitudes themselves."""
    return magnitudes


def _numbers(magnitudes: jax.Array) -> jax.Array:
    """In the order of the magnitudes, and 0 for -1, uint32."""
    bits = lax.bitcast_convert_type(magnitudes, jnp.uint32)
    return jnp.where(magnitudes < 0, 0, bits + jnp.uint32(1))


def by_sort(magnitudes: jax.Array, k: int) -> jax.Array:
    """Where the `k` largest are in each row, ascending, uint32[..., k]."""
    _, indices = lax.top_k(magnitudes, k)
    return jnp.sort(indices, axis=-1).astype(jnp.uint32)


def by_threshold(magnitudes: jax.Array, k: int) -> jax.Array:
    """The same of one row."""
    numbers = _numbers(magnitudes)
    least = kth_largest(numbers, k)
    above, equal = _bits.pack_bits(numbers > least), _bits.pack_bits(numbers == least)
    chosen = above | first_bits(equal, k - count(above))
    size = magnitudes.size
    return jnp.sort(members(chosen, 0, k, Parts(size, 1, size))).astype(jnp.uint32)


def by_sample(x: jax.Array, k: int, magnitude: Magnitude = as_it_is) -> jax.Array:
    """The same of one row, whose magnitudes are taken anew wherever they are read."""
    return select(x, k, lambda part: _numbers(magnitude(part)))


def largest(x: jax.Array, k: int, magnitude: Magnitude = as_it_is) -> jax.Array:
    """Where the `k` largest of each row are, of equal ones the first; ascending, uint32[..., k].

    Args:
      x: float32[..., size].
      k: At most `size`.
      magnitude: By which they are large, coordinate by coordinate: 0 or more; or -1, which is below
        them. To take it here, and not before, saves a copy on CPUs.
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
    """Where the `k` largest of max(x, 0) and of max(-x, 0) are, each ascending, uint32[2, k]."""
    if flat.size < LARGE:
        # One call for both signs, since each is a sort to compile.
        return largest(jnp.maximum(jnp.stack([flat, -flat]), 0), k)
    above = largest(flat, k, lambda x: jnp.maximum(x, 0))
    return jnp.stack([above, largest(flat, k, lambda x: jnp.maximum(-x, 0))])
