"""The exact mean, with which everything is compared."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import AxisName, PyTree
from jaxcomm._buckets import require_floating
from jaxcomm.aggregation._weights import weigh


def mean(axis_name: AxisName = "data") -> optax.GradientTransformationExtraArgs:
    r"""Replaces each worker's update by the mean over workers, in float32.

    .. math:: \bar x = \frac{1}{n} \sum_{i=1}^n x_i

    A worker sends :math:`2 (n-1)/n` times 4 bytes a coordinate in a ring all-reduce, whatever the
    dtype of the leaf (8 bytes where it is float64). Adding in 16 bits would lose what it saves.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.

    Returns:
      A transformation to place before the optimizer. Updates come back equal on all workers, in
      their shape and dtype. `update(..., weight=w)` makes the mean a weighted one. NaN and infinity
      stay what they are, on every worker.

    Raises:
      ValueError: In `update`, if `axis_name` is not bound, or an update is already summed or not
        floating-point.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.mean("data")
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([1.0, 2.0, 6.0])))
      [3. 3. 3.]
    """

    def init_fn(params: PyTree) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update_fn(
        updates: PyTree,
        state: optax.EmptyState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        **extra_args: object,
    ) -> tuple[PyTree, optax.EmptyState]:
        del params, extra_args
        require_floating(updates)
        _axis.require_local(updates, axis_name)
        workers = _axis.size(axis_name)
        weighed = (lambda x: x) if weight is None else weigh(axis_name, weight)

        def average(x: jax.Array) -> jax.Array:
            wide = x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)
            return (lax.psum(weighed(wide), _axis.names(axis_name)) / workers).astype(x.dtype)

        return jax.tree.map(average, updates), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
