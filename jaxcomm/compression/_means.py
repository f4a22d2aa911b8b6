"""Means that neither overflow nor underflow, and counts that XLA vectorizes on CPUs."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._units import LARGE

_PLANES = 32


def lift_of(peak: jax.Array) -> jax.Array:
    """A power of two that scales `peak` away from overflow and from denormals."""
    return jnp.where(peak < 1, jnp.float32(2.0**64), jnp.float32(2.0**-64))


def mean_where(
    chosen: jax.Array, magnitudes: jax.Array, axis: int | tuple[int, ...] | None = None
) -> jax.Array:
    """The mean of the chosen magnitudes, or 0 if none is chosen. Sums never overflow or underflow.

    Args:
      chosen: bool of the shape of `magnitudes`.
      magnitudes: float32, not negative where chosen.
      axis: As for `jnp.sum`.
    """
    kept = jnp.where(chosen, magnitudes, 0)
    peak = jnp.max(kept, axis=axis, keepdims=True, initial=0)
    total = jnp.sum(kept * lift_of(peak), axis=axis, keepdims=True)
    count = jnp.sum(chosen, axis=axis, keepdims=True, dtype=jnp.uint32)  # Up to 2**32.
    mean = total / jnp.maximum(count, 1).astype(jnp.float32)
    mean *= jnp.where(peak < 1, jnp.float32(2.0**-64), jnp.float32(2.0**64))
    # The mean of equal numbers may be rounded up, at the largest float to infinity.
    return jnp.squeeze(jnp.minimum(mean, peak), axis)


def mean_magnitude(x: jax.Array) -> jax.Array:
    """The mean of |x|, float32[], or 0 of an empty array. Sums never overflow or underflow.

    Each of the two passes computes `abs(x)` again. If they shared it, XLA for CPUs would write it
    to memory.
    """
    peak = jnp.max(jnp.abs(x), initial=0)
    back = jnp.where(peak < 1, jnp.float32(2.0**-64), jnp.float32(2.0**64))
    mean = jnp.sum(jnp.abs(x * lift_of(peak))) / float(max(x.size, 1)) * back
    # The mean of equal numbers may be rounded up, at the largest float to infinity.
    return jnp.minimum(mean, peak)


def over_peak(x: jax.Array, peak: jax.Array) -> jax.Array:
    """`x / peak` for the largest magnitude of `x`, which may be any float; 0 if it is 0.

    XLA multiplies by the reciprocal of the peak, which would be 0 for the largest numbers. A power
    of two brings it into range; it is 1 for ordinary numbers, whose derivatives have squares of it.
    """
    lift = jnp.where(peak < 2.0**-40, 2.0**64, jnp.where(peak > 2.0**40, 2.0**-64, 1.0))
    lift = lift.astype(x.dtype)
    return x * lift / jnp.where(peak > 0, peak * lift, 1)


def headroom(workers: int) -> float:
    """The largest power of two that is at most 1/n.

    Values scaled by it can be added over workers without overflow. The scaling is exact, except for
    numbers close to the smallest normal one.
    """
    return 2.0 ** -(workers - 1).bit_length()


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


def count_true(marks: jax.Array) -> jax.Array:
    """The number of true elements by a single sum, int32[]; on CPUs `total` is faster."""
    return jnp.sum(marks, dtype=jnp.int32)


def how_many(marks: jax.Array) -> jax.Array:
    """The number of true entries of bool[n], int32[]."""
    if marks.size < LARGE:
        return count_true(marks)
    return lax.platform_dependent(marks, cpu=total, default=count_true)
