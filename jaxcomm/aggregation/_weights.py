"""Weighted means: every aggregator weighs in the same way, before it measures anything."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import AxisName


def weigh(axis_name: AxisName, weight: jax.Array | float) -> Callable[[jax.Array], jax.Array]:
    r"""Scales a worker's update such that the plain mean becomes the weighted one.

    .. math:: x_i \mapsto \frac{n\, w_i}{\sum_j w_j}\, x_i

    A worker of weight 0 contributes nothing, whatever its update holds: a mean over no samples is
    often NaN. Where all weights are 0, so is the mean. One float32 is summed over workers.

    Args:
      axis_name: The axis of the mean.
      weight: float[] of this worker, at least 0; a count of samples, say.

    Raises:
      ValueError: If `weight` is not a scalar.
    """
    own = jnp.asarray(weight, jnp.float32)
    if own.shape != ():
        raise ValueError(f"`weight` must be a scalar on each worker, got shape {own.shape}.")
    own = _axis.as_varying(own, axis_name)
    total = lax.psum(own, _axis.names(axis_name))
    scale = jnp.where(total == 0, 0, own * _axis.size(axis_name) / total)
    return lambda x: jnp.where(own == 0, 0, x * scale.astype(x.dtype))
