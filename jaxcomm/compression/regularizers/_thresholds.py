"""Soft thresholding: proximal operators of sums of magnitudes, and of norms of groups."""

import jax
import jax.numpy as jnp

from jaxcomm._axis import require_shards
from jaxcomm.compression._means import over_peak


def wide_of(x: jax.Array) -> jax.Array:
    """The array in float32 at least."""
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)


def soft_threshold(x: jax.Array, threshold: jax.Array | float) -> jax.Array:
    r"""Moves each coordinate toward zero by a threshold, and to zero if it is within.

    .. math:: \operatorname{prox}_{\tau \|\cdot\|_1}(x)_j = \operatorname{sign}(x_j)
              \max(|x_j| - \tau, 0)

    Nothing is sent.

    Args:
      x: An array of floats.
      threshold: :math:`\tau`, at least 0; may be traced.

    Returns:
      An array like `x`, of float32 at least. NaN stays NaN.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.compression.regularizers import soft_threshold
      >>> print(soft_threshold(jnp.array([3.0, -0.5, -2.0]), 1.0))
      [ 2.  0. -1.]

    References:
      Parikh, Boyd, `Proximal Algorithms <https://doi.org/10.1561/2400000003>`_, 2014, 6.5.2.
    """
    wide = wide_of(x)
    most = jnp.asarray(threshold, wide.dtype)
    return wide - jnp.clip(wide, -most, most)  # Moreau: the rest is the projection on a cube.


def _shrunk(groups: jax.Array, threshold: jax.Array) -> jax.Array:
    """Rows [groups, size], each with its norm reduced by the threshold."""
    peak = jnp.max(jnp.abs(groups), axis=1, keepdims=True, initial=0)
    unit = over_peak(groups, peak)  # Squares neither overflow nor vanish.
    norm = peak * jnp.sqrt(jnp.sum(jnp.square(unit), axis=1, keepdims=True))
    return groups * (jnp.maximum(norm - threshold, 0) / jnp.where(norm > 0, norm, 1))


def group_soft_threshold(x: jax.Array, threshold: jax.Array | float) -> jax.Array:
    r"""Reduces the norm of each row by a threshold; rows of a smaller norm become zero.

    .. math:: \operatorname{prox}(x)_g = \max\Big(1 - \frac{\tau \sqrt{m}}{\|x_g\|_2}, 0\Big) x_g

    for rows :math:`x_g` of :math:`m` coordinates: all axes but the first. The rows of an array of
    one axis, or none, are its coordinates, so that this is :func:`soft_threshold`. Nothing is sent.

    Args:
      x: An array of floats.
      threshold: :math:`\tau`, at least 0; may be traced.

    Returns:
      An array like `x`, of float32 at least. A row with a NaN becomes NaN.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.compression.regularizers import group_soft_threshold
      >>> print(group_soft_threshold(jnp.array([[3.0, 4.0], [0.3, 0.4]]), 2.0**-0.5))
      [[2.4 3.2]
       [0.  0. ]]

    References:
      Yuan, Lin, `Model Selection and Estimation in Regression with Grouped Variables
      <https://doi.org/10.1111/j.1467-9868.2005.00532.x>`_, 2006.
    """
    if x.ndim < 2 or not x.size:
        return soft_threshold(x, threshold)
    wide = wide_of(x)
    rows = wide.reshape(x.shape[0], -1)
    scaled = jnp.asarray(threshold, wide.dtype) * rows.shape[1] ** 0.5
    return _shrunk(rows, scaled).reshape(x.shape)


def block_soft_threshold(x: jax.Array, threshold: jax.Array | float, block_size: int) -> jax.Array:
    r"""Reduces the norm of each block of consecutive coordinates by a threshold.

    The operator is that of :func:`group_soft_threshold`, for blocks of :math:`m` consecutive
    coordinates of the flat array; the last one may have fewer. Sparsifiers of blocks, such as
    `nonzero(granularity=m)`, then send a few whole blocks. Nothing is sent here.

    Args:
      x: An array of floats. It is flattened, so it must not be sharded.
      threshold: :math:`\tau`, at least 0; may be traced.
      block_size: :math:`m`, a Python int.

    Returns:
      An array like `x`, of float32 at least. A block with a NaN becomes NaN.

    Raises:
      ValueError: If a step says that parameters are sharded.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.compression.regularizers import block_soft_threshold
      >>> print(block_soft_threshold(jnp.array([3.0, 4.0, 0.3, 0.4, 2.0]), 2.0**-0.5, 2))
      [2.4       3.2       0.        0.        1.2928932]

    References:
      Yuan, Lin, `Model Selection and Estimation in Regression with Grouped Variables
      <https://doi.org/10.1111/j.1467-9868.2005.00532.x>`_, 2006.
    """
    require_shards()
    wide, whole = wide_of(x).ravel(), x.size // block_size * block_size
    scale = jnp.asarray(threshold, wide.dtype)
    blocks = _shrunk(wide[:whole].reshape(-1, block_size), scale * block_size**0.5).ravel()
    rest = _shrunk(wide[None, whole:], scale * (x.size - whole) ** 0.5)[0]
    return jnp.concatenate([blocks, rest]).reshape(x.shape)
