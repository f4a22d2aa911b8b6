"""Counters of steps, which go on for as long as training does."""

import jax
import jax.numpy as jnp
import numpy as np


def turn(dtype: np.dtype, period: int) -> int:
    """By how much a counter that is full goes back: whole periods, half its range if they fit."""
    half = (int(jnp.iinfo(dtype).max) + 1) // 2
    return max(half // period, 1) * period


def following(step: jax.Array, period: int = 1) -> jax.Array:
    r"""The number of steps after one more; a counter that is full goes back by whole periods.

    .. math:: t \gets t + 1, \qquad t \gets t + 1 - m k \text{ where } t + 1 \text{ does not fit}

    So what depends on :math:`t \bmod k` goes on, numbers differ from step to step, and what ends
    after at most half the range of the counter, such as a warm-up, does not begin again.

    Args:
      step: An integer array.
      period: :math:`k`, at least 1.
    """
    last = np.array(jnp.iinfo(step.dtype).max, step.dtype)
    return jnp.where(step == last, last - (turn(step.dtype, period) - 1), step + 1)
