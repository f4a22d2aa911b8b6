"""Slopes of the losses of all workers along random directions, and the gradient from them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis, _noise
from jaxcomm._axis import names_itself
from jaxcomm._contract import AxisName, PyTree
from jaxcomm._gradients import LossFn
from jaxcomm._units import require_floating
from jaxcomm.aggregation._directions import Directions, Distribution, require_distribution
from jaxcomm.aggregation._warmup import require_steps
from jaxcomm.aggregation._weights import weigh
from jaxcomm.compression._means import headroom


def require_smoothing(smoothing: Any) -> None:
    """Raises unless `smoothing` is positive and finite, or traced."""
    if isinstance(smoothing, jax.Array):
        return
    if isinstance(smoothing, bool) or not isinstance(smoothing, int | float):
        raise ValueError(f"`smoothing` must be a positive number, got {smoothing!r}.")
    if not 0 < smoothing < math.inf:
        raise ValueError(f"`smoothing` must be positive and finite, got {smoothing!r}.")


def _moved(x: jax.Array, u: jax.Array, length: jax.Array) -> jax.Array:
    wide = x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)
    return (wide + (length * u).astype(wide.dtype)).astype(x.dtype)


def differences(
    loss: Any, params: PyTree, directions: Directions, smoothing: jax.Array | float
) -> tuple[PyTree, jax.Array]:
    """The mean value over all points, and the slope of the loss along each direction."""
    length = jnp.asarray(smoothing, jnp.float32)

    def along(direction: PyTree) -> tuple[PyTree, jax.Array]:
        values = [
            jax.tree.map(
                lambda x: jnp.asarray(x).astype(jnp.float32),
                loss(
                    jax.tree.map(lambda x, u, s=sign: _moved(x, u, s * length), params, direction)
                ),
            )
            for sign in (1.0, -1.0)
        ]
        above, below = (jax.tree.leaves(value)[0] for value in values)
        mean = jax.tree.map(lambda x, y: x / 2 + y / 2, *values)
        return mean, (above - below) / (2 * length)

    values, slopes = directions.each(along)
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), values), slopes


def mean_along(
    axes: AxisName, directions: Directions, slopes: jax.Array, weight: jax.Array | float | None
) -> tuple[PyTree, jax.Array]:
    """The mean over workers and directions of slope times direction, and whether it is finite."""
    workers = _axis.size(axes)
    small = headroom(workers)
    scaled = slopes if weight is None else weigh(axes, weight, slopes)(slopes)
    total = lax.psum(_axis.as_varying(scaled, axes) * small, axes) / (workers * small)
    finite = jnp.all(jnp.isfinite(total))
    combined = directions.combined(total / slopes.size)
    return jax.tree.map(lambda x: jnp.where(finite, x, jnp.nan), combined), finite


_UNEQUAL = (
    "`zeroth_order` adds slopes of all workers at one point: pass parameters that are equal on all "
    "workers, not those of `jaxcomm.replicate` or `jaxcomm.local_params`."
)


def require_equal_params(params: PyTree, axes: AxisName, is_own: bool = False) -> None:
    """Raises if parameters are each worker's own, or their types say so (checked mode only)."""
    if is_own:
        raise ValueError(_UNEQUAL)
    _axis.require_replicated(params, axes, "The parameter", _UNEQUAL)


@names_itself
def zeroth_order_gradient(
    loss_fn: LossFn,
    params: PyTree,
    *args: PyTree,
    key: jax.Array,
    directions: int = 1,
    smoothing: jax.Array | float = 1e-3,
    distribution: Distribution = "gaussian",
    axis_name: AxisName = "data",
) -> tuple[jax.Array, PyTree]:
    r"""A gradient from the losses of all workers along random directions, for use by hand.

    .. math:: g = \frac{1}{K} \sum_{k=1}^{K} \frac{1}{n} \sum_i
              \frac{f_i(x + \mu u_k) - f_i(x - \mu u_k)}{2 \mu}\, u_k

    Call it inside `jax.shard_map` or `jax.vmap` over the workers. :func:`jaxcomm.zeroth_order` is
    the transformation for :func:`jaxcomm.make_step`, and explains the method. A worker sends
    :math:`4 K` bytes in one all-reduce.

    Args:
      loss_fn: `(params, *args) -> loss`, a scalar. It is not differentiated.
      params: Parameters, equal on all workers.
      *args: The other arguments of the loss, such as the batch of this worker.
      key: A typed threefry key, equal on all workers, and another one in each step.
      directions: :math:`K`, a Python int.
      smoothing: :math:`\mu`, positive; may be traced.
      distribution: `"gaussian"`, or `"rademacher"` for signs.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      `(loss, gradient)`: this worker's mean loss over the :math:`2 K` points, float32[], and the
      gradient, equal on all workers, with the shapes and dtypes of the parameters. A loss that is
      not finite on any worker makes the gradient NaN on all workers.

    Raises:
      ValueError: If an option is out of range, if `axis_name` is not bound, if parameters differ
        by worker or are not floating-point, or the loss is not a scalar.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.aggregation import zeroth_order_gradient
      >>> def gradient(w, x):
      ...     loss = lambda w, x: jnp.mean((w - x) ** 2)
      ...     return zeroth_order_gradient(
      ...         loss, w, x, key=jax.random.key(0), distribution="rademacher"
      ...     )[1]
      >>> found = jax.vmap(gradient, (None, 0), axis_name="data")(
      ...     jnp.float32(3), jnp.array([1.0, 2.0])
      ... )
      >>> print(jnp.round(found, 2))
      [3. 3.]

    References:
      Malladi et al., `Fine-Tuning Language Models with Just Forward Passes
      <https://arxiv.org/abs/2305.17333>`_, 2023.
    """
    require_steps("directions", directions)
    require_smoothing(smoothing)
    require_distribution(distribution)
    require_floating(params)
    _axis.index(axis_name)
    require_equal_params(params, axis_name)
    if not jax.tree.leaves(params):
        return jnp.asarray(loss_fn(params, *args), jnp.float32), params

    def loss(params: PyTree) -> jax.Array:
        value = loss_fn(params, *args)
        if jnp.shape(value) != ():
            raise ValueError(f"`loss_fn` must return a scalar, got shape {jnp.shape(value)}.")
        return value

    drawn = Directions(
        params, _noise.make_key(0, key), jnp.zeros((), jnp.uint32), directions, distribution
    )
    value, slopes = differences(loss, params, drawn, smoothing)
    gradient, _ = mean_along(axis_name, drawn, slopes, None)
    return value, jax.tree.map(lambda g, x: g.astype(x.dtype), gradient, params)
