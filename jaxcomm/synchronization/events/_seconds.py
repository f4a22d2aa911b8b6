"""Seconds as an unevaluated sum of two float32, so that a long simulation keeps its order."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Seconds(NamedTuple):
    r"""Points in time, :math:`t = h + l` with :math:`|l|` at most half a unit of :math:`h`."""

    high: jax.Array  # float32
    low: jax.Array  # float32


def no_seconds(shape: tuple[int, ...]) -> Seconds:
    """The time 0."""
    return Seconds(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))


def later(time: Seconds, seconds: jax.Array) -> Seconds:
    r"""The time :math:`t + s`, rounded to about 48 bits.

    The error of the float32 sum is itself a float32, which the last line of a two-sum computes.
    """
    total = time.high + seconds
    part = total - time.high
    error = (time.high - (total - part)) + (seconds - part)
    low = time.low + error
    high = total + low
    return Seconds(high, low - (high - total))


def first(time: Seconds, among: jax.Array) -> jax.Array:
    """The index of the earliest time in the mask `among`, int32[]; the lowest index of equals."""
    high = jnp.where(among, time.high, jnp.inf)
    low = jnp.where(among & (high == jnp.min(high)), time.low, jnp.inf)
    return jnp.argmin(low).astype(jnp.int32)


def last(time: Seconds, among: jax.Array) -> Seconds:
    """The latest time in the mask `among`."""
    high = jnp.where(among, time.high, -jnp.inf)
    low = jnp.where(among & (high == jnp.max(high)), time.low, -jnp.inf)
    index = jnp.argmax(low)
    return Seconds(time.high[index], time.low[index])
