"""Weighted means: every aggregator weighs in the same way, before it measures anything."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import AxisName
from jaxcomm._require import own_weight


def weigh(axis_name: AxisName, weight: jax.Array | float) -> Callable[[jax.Array], jax.Array]:
    r"""Scales a worker's update such that the plain mean becomes the weighted one.

    .. math:: x_i \mapsto \frac{n\, w_i}{\sum_j w_j}\, x_i

    A worker of weight 0 contributes nothing, whatever its update holds: a mean over no samples is
    often NaN. Where all weights are 0, so is the mean. A weight that is negative or not finite, or
    not 0 and below 2^-100 or above 2^100, makes the mean NaN on all workers. One float32 is summed
    over workers.

    Args:
      axis_name: The axis of the mean.
      weight: float[] of this worker, 0 or from 2^-100 to 2^100; a count of samples, say.

    Raises:
      ValueError: As `own_weight` does.
    """
    workers = _axis.size(axis_name)
    own = _axis.as_varying(own_weight(weight), axis_name)
    total = lax.psum(own, axis_name)

    def scaled(x: jax.Array) -> jax.Array:
        share = own.astype(x.dtype) * workers / total.astype(x.dtype)
        return jnp.where(own == 0, 0, x * share)

    return scaled
