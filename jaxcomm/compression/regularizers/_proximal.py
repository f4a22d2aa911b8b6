"""Proximal operators by soft thresholding, and gradient steps of any optimizer before them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm._axis import require_shards
from jaxcomm._contract import PyTree, require_state
from jaxcomm._require import AtLeastZero, checked
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
      >>> from jaxcomm.compression.regularizers._proximal import soft_threshold
      >>> print(soft_threshold(jnp.array([3.0, -0.5, -2.0]), 1.0))
      [ 2.  0. -1.]

    References:
      Parikh, Boyd, `Proximal Algorithms <https://doi.org/10.1561/2400000003>`_, 2014, 6.5.2.
    """
    wide = wide_of(x)
    most = jnp.asarray(threshold, wide.dtype)
    return wide - jnp.clip(wide, -most, most)  # Moreau: the rest is the projection on a cube.


def row_norms(rows: jax.Array) -> jax.Array:
    """The norm of each row [groups, size], [groups, 1]."""
    peak = jnp.max(jnp.abs(rows), axis=1, keepdims=True, initial=0)
    unit = over_peak(rows, peak)  # Squares neither overflow nor vanish.
    return peak * jnp.sqrt(jnp.sum(jnp.square(unit), axis=1, keepdims=True))


def _shrunk(groups: jax.Array, threshold: jax.Array) -> jax.Array:
    """Rows [groups, size], each with its norm reduced by the threshold."""
    norm = row_norms(groups)
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
      >>> from jaxcomm.compression.regularizers._proximal import group_soft_threshold
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
      >>> from jaxcomm.compression.regularizers._proximal import block_soft_threshold
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


class Regularizer(NamedTuple):
    r"""A convex function of the parameters, and its proximal operator.

    Attributes:
      value: `params -> float32[]`.
      operator: `(params, step) -> params`, with a step of at least 0, a number or float32[]:
        :math:`\operatorname{argmin}_y\, s\, r(y) + \frac{1}{2} \|y - x\|^2`. Leaves may be wider
        than those of `params`.
    """

    value: Callable[[PyTree], jax.Array]
    operator: Callable[[PyTree, jax.Array | float], PyTree]


class RegularizedState(NamedTuple):
    """The state of `proximal`, equal on all workers if that of the optimizer is."""

    step: jax.Array  # int32[]
    inner: Any


@checked
def proximal(
    tx: optax.GradientTransformation,
    regularizer: Regularizer,
    learning_rate: AtLeastZero | jax.Array | optax.Schedule,
) -> optax.GradientTransformationExtraArgs:
    r"""The proximal operator of a regularizer after the step of an optimizer.

    .. math:: (\Delta, s') = \mathrm{tx}(g, s, x), \qquad
              x' = \operatorname{prox}_{\eta r}(x + \Delta)
                 = \operatorname*{argmin}_y\; r(y) + \frac{1}{2 \eta} \|y - (x + \Delta)\|^2

    With `optax.sgd(learning_rate)` this is proximal gradient descent, whose fixed points are the
    minimizers of loss plus :math:`r` if both are convex. With an optimizer that scales coordinates,
    such as Adam, the regularizer keeps the rate :math:`\eta` for all coordinates, as the weight
    decay of AdamW does.

    Weights that become zero are exactly zero, and so are the updates of weights that stay zero. So
    a sparsifier with capacity for the others, such as `nonzero`, sends them exactly:

    - updates, as the `pull` of :func:`jaxcomm.sharded_server` around this transformation (with
      :func:`jaxcomm.compression.regularizers.l1`, which is element-wise);
    - sums of updates in the exchanges of local steps, with this transformation as inner optimizer;
    - slices of weights, in :func:`jaxcomm.aggregation.weight_gather`.

    Gradients stay dense. Nothing is sent here.

    Args:
      tx: An optimizer, or a whole chain of aggregator and optimizer.
      regularizer: The regularizer, from :mod:`jaxcomm.compression.regularizers` or your own.
      learning_rate: :math:`\eta`, that of the optimizer: a number of at least 0, which may be
        traced, or a schedule of the number of steps.

    Returns:
      A transformation to use in place of `tx`, as the last one of a chain. A NaN in the step of
      `tx` is a NaN in the update.

    Raises:
      ValueError: If an argument is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxcomm
      >>> from jaxcomm.compression.regularizers import l1
      >>> tx = jaxcomm.proximal(optax.sgd(1.0), l1(0.5), learning_rate=1.0)
      >>> params = jnp.array([2.0, 0.2])
      >>> update, _ = tx.update(jnp.array([1.0, 0.1]), tx.init(params), params)
      >>> print(params + update)
      [0.5 0. ]

    References:
      Parikh, Boyd, `Proximal Algorithms <https://doi.org/10.1561/2400000003>`_, 2014. Grishchenko
      et al., `Asynchronous Distributed Learning with Sparse Communications and Identification
      <https://arxiv.org/abs/1812.03871>`_, 2018, for sparse iterates that are sent sparsely.
    """
    inner = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> RegularizedState:
        return RegularizedState(jnp.zeros((), jnp.int32), inner.init(params))

    def update_fn(
        updates: PyTree, state: RegularizedState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, RegularizedState]:
        require_state(state, RegularizedState, "`proximal`")
        steps, after = inner.update(updates, state.inner, params, **extra_args)
        rate: Any = learning_rate(state.step) if callable(learning_rate) else learning_rate
        moved = jax.tree.map(lambda x, step: wide_of(x) + wide_of(step), params, steps)
        shrunk = regularizer.operator(moved, rate)
        # The update of a weight that becomes zero is exact, also in 16 bits: it is -x.
        result = jax.tree.map(
            lambda y, x, step: (y - x.astype(y.dtype)).astype(step.dtype), shrunk, params, steps
        )
        return result, RegularizedState(optax.safe_increment(state.step), after)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
