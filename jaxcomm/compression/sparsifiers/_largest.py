"""Finds the positions of the largest coordinates without a copy of all of them.

A sort needs the magnitudes and as many positions, twice. Instead, the least selected magnitude is
found by counting, and the coordinates that reach it are marked by one bit each. On CPUs this is
restricted to the few coordinates above a threshold estimated from a sample.
"""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._units import LARGE
from jaxcomm.compression import _bits
from jaxcomm.compression._support import Parts, count, members
from jaxcomm.compression.sparsifiers._selection import count_true, kth_largest, select

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
