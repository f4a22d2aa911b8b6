"""Reductions of large arrays, in steps that XLA vectorizes on CPUs."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._units import LARGE

_PLANES = 32


def total(numbers: jax.Array) -> jax.Array:
    """The number of true entries of bool[n], or the sum of int32[n]; int32[].

    Meant for CPUs, where one sum over all entries takes ten times as long. On other devices the
    reshape to planes would copy the array.
    """
    while numbers.size > _PLANES**2:
        rest = numbers.size % _PLANES
        whole = numbers.size - rest
        planes = numbers[:whole].reshape(_PLANES, -1)
        # Without the barrier, XLA fuses the steps into one sum.
        sums = lax.optimization_barrier(jnp.sum(planes, axis=0, dtype=jnp.int32))
        numbers = sums.at[:rest].add(numbers[whole:].astype(jnp.int32)) if rest else sums
    return jnp.sum(numbers, dtype=jnp.int32)


def peak(numbers: jax.Array) -> jax.Array:
    """The maximum of float32[n] without negative entries; 0 if it is empty."""

    def by_planes(numbers: jax.Array) -> jax.Array:
        rest = numbers.size % _PLANES
        planes = numbers[: numbers.size - rest].reshape(_PLANES, -1)
        maxima = lax.optimization_barrier(jnp.max(planes, axis=0))
        return jnp.maximum(jnp.max(maxima), jnp.max(numbers[numbers.size - rest :], initial=0))

    def at_once(numbers: jax.Array) -> jax.Array:
        return jnp.max(numbers, initial=0)

    if numbers.size < LARGE:
        return at_once(numbers)
    return lax.platform_dependent(numbers, cpu=by_planes, default=at_once)


def how_many(marks: jax.Array) -> jax.Array:
    """The number of true entries of bool[n], int32[]."""

    def at_once(marks: jax.Array) -> jax.Array:
        return jnp.sum(marks, dtype=jnp.int32)

    if marks.size < LARGE:
        return at_once(marks)
    return lax.platform_dependent(marks, cpu=total, default=at_once)
