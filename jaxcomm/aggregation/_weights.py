"""Weighted means: every aggregator scales updates by their weights first, in the same way."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PyTree
from jaxcomm._require import own_weight, weight_dtype


def weighted(x: jax.Array, own: jax.Array, total: jax.Array, workers: int) -> jax.Array:
    """Scales `x` by n w / sum(w); 0 if the weight is 0, even if `x` is NaN."""
    share = own.astype(x.dtype) * workers / total.astype(x.dtype)
    return jnp.where(own == 0, 0, x * share)


def weigh(
    axis_name: AxisName, weight: jax.Array | float, like: PyTree
) -> Callable[[jax.Array], jax.Array]:
    r"""Scales a worker's update so that the plain mean becomes the weighted mean.

    .. math:: x_i \mapsto \frac{n\, w_i}{\sum_j w_j}\, x_i

    A worker of weight 0 contributes nothing, even if its update is NaN, as a mean over no samples
    often is. If all weights are 0, the mean is 0. A weight that is negative or not finite, above
    2^100, or below 2^-100 but not 0, makes the mean NaN on all workers. The all-reduce of the
    weights sums one float32; one float64 if a leaf of `like` is float64.

    Args:
      axis_name: The axis of the mean.
      weight: float[] of this worker, 0 or from 2^-100 to 2^100; e.g. a number of samples.
      like: The updates that the result is called with.

    Raises:
      ValueError: Under the conditions of `own_weight`.
    """
    workers = _axis.size(axis_name)
    own = _axis.as_varying(own_weight(weight, weight_dtype(like)), axis_name)
    total = lax.psum(own, axis_name)
    return lambda x: weighted(x, own, total, workers)
