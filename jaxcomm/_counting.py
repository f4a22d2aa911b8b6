"""Sums over large arrays, in steps that compilers for CPUs make vectors of."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._units import LARGE

_PLANES = 32


def total(numbers: jax.Array) -> jax.Array:
    """How many of one axis are true, or the sum of int32; int32[].

    On CPUs, where a sum of all at once takes ten times it; elsewhere planes would be moved.
    """
    while numbers.size > _PLANES**2:
        rest = numbers.size % _PLANES
        whole = numbers.size - rest
        planes = numbers[:whole].reshape(_PLANES, -1)
        # Else the steps are joined again.
        sums = lax.optimization_barrier(jnp.sum(planes, axis=0, dtype=jnp.int32))
        numbers = sums.at[:rest].add(numbers[whole:].astype(jnp.int32)) if rest else sums
    return jnp.sum(numbers, dtype=jnp.int32)


def peak(numbers: jax.Array) -> jax.Array:
    """The largest of one axis of float32, none of them negative; 0 of none."""

    def by_planes(numbers: jax.Array) -> jax.Array:
        rest = numbers.size % _PLANES
        planes = numbers[: numbers.size - rest].reshape(_PLANES, -1)
        most = lax.optimization_barrier(jnp.max(planes, axis=0))
        return jnp.maximum(jnp.max(most), jnp.max(numbers[numbers.size - rest :], initial=0))

    def at_once(numbers: jax.Array) -> jax.Array:
        return jnp.max(numbers, initial=0)

    if numbers.size < LARGE:
        return at_once(numbers)
    return lax.platform_dependent(numbers, cpu=by_planes, default=at_once)


def how_many(marks: jax.Array) -> jax.Array:
    """How many of one axis are true, int32[]."""

    def at_once(marks: jax.Array) -> jax.Array:
        return jnp.sum(marks, dtype=jnp.int32)

    if marks.size < LARGE:
        return at_once(marks)
    return lax.platform_dependent(marks, cpu=total, default=at_once)
