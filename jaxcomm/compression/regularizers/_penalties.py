"""Regularizers that make coordinates, rows or blocks of weights zero."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jaxcomm._contract import PyTree
from jaxcomm._require import AtLeastZero, Positive, checked
from jaxcomm.compression.regularizers._proximal import (
    Regularizer,
    block_soft_threshold,
    group_soft_threshold,
    row_norms,
    soft_threshold,
    wide_of,
)

Mask: TypeAlias = Callable[[PyTree], PyTree] | PyTree
Threshold: TypeAlias = Callable[[jax.Array, jax.Array | float], jax.Array]


def _norms(rows: jax.Array) -> jax.Array:
    """The sum of the norms of rows [groups, size], each times the root of the size."""
    return jnp.sum(row_norms(rows)) * rows.shape[1] ** 0.5


def _of_leaves(
    strength: jax.Array | float,
    mask: Mask,
    threshold: Threshold,
    value_of: Callable[[jax.Array], jax.Array],
) -> Regularizer:
    """The regularizer that treats each leaf of the mask by itself."""

    def chosen(params: PyTree) -> PyTree:
        flags = mask(params) if callable(mask) else mask
        return jax.tree.broadcast(flags, params)

    def value(params: PyTree) -> jax.Array:
        flags = jax.tree.leaves(chosen(params))
        leaves = [x for x, flag in zip(jax.tree.leaves(params), flags, strict=True) if flag]
        total = sum([value_of(x).astype(jnp.float32) for x in leaves], jnp.zeros((), jnp.float32))
        return jnp.asarray(strength, jnp.float32) * total

    def operator(params: PyTree, step: jax.Array | float) -> PyTree:
        scaled = step * strength
        return jax.tree.map(
            lambda x, flag: threshold(x, scaled) if flag else x, params, chosen(params)
        )

    return Regularizer(value, operator)


@checked
def l1(strength: AtLeastZero | jax.Array, mask: Mask = True) -> Regularizer:
    r"""The sum of magnitudes, which makes single coordinates zero: soft thresholding.

    .. math:: r(x) = \lambda \|x\|_1

    Nothing is sent.

    Args:
      strength: :math:`\lambda`, at least 0; may be traced.
      mask: Which leaves have the penalty, as for `optax.masked`: a tree of Python bools that is a
        prefix of the parameters, or a function from parameters to it.

    Returns:
      A regularizer for :func:`jaxcomm.proximal`. It is element-wise, so it suits
      :func:`jaxcomm.sharded_server`.

    Raises:
      ValueError: If `strength` is not a number of at least 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.compression.regularizers import l1
      >>> print(l1(0.5).value(jnp.array([3.0, -1.0])))
      2.0

    References:
      Tibshirani, `Regression Shrinkage and Selection via the Lasso
      <https://doi.org/10.1111/j.2517-6161.1996.tb02080.x>`_, 1996.
    """
    return _of_leaves(strength, mask, soft_threshold, lambda x: jnp.sum(jnp.abs(wide_of(x))))


@checked
def group_lasso(strength: AtLeastZero | jax.Array, mask: Mask = True) -> Regularizer:
    r"""The sum of the norms of rows, which makes whole rows zero: group soft thresholding.

    .. math:: r(x) = \lambda \sum_g \sqrt{m_g}\, \|x_g\|_2

    for rows of :math:`m_g` coordinates: all axes of a leaf but the first. A leaf of one axis has a
    row per coordinate. Nothing is sent.

    Args:
      strength: :math:`\lambda`, at least 0; may be traced.
      mask: As for :func:`l1`.

    Returns:
      A regularizer for :func:`jaxcomm.proximal`.

    Raises:
      ValueError: If `strength` is not a number of at least 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.compression.regularizers import group_lasso
      >>> print(group_lasso(1.0).value(jnp.full((2, 4), 0.5)))
      4.0

    References:
      Yuan, Lin, `Model Selection and Estimation in Regression with Grouped Variables
      <https://doi.org/10.1111/j.1467-9868.2005.00532.x>`_, 2006.
    """

    def value_of(x: jax.Array) -> jax.Array:
        wide = wide_of(x)
        is_matrix = x.ndim > 1 and x.size
        return _norms(wide.reshape(x.shape[0], -1)) if is_matrix else jnp.sum(jnp.abs(wide))

    return _of_leaves(strength, mask, group_soft_threshold, value_of)


@checked
def block_lasso(
    strength: AtLeastZero | jax.Array, block_size: Positive, mask: Mask = True
) -> Regularizer:
    r"""The sum of the norms of blocks, which makes whole blocks zero: block soft thresholding.

    .. math:: r(x) = \lambda \sum_b \sqrt{m_b}\, \|x_b\|_2

    for blocks of `block_size` consecutive coordinates of each leaf; the last one may have fewer.
    Nothing is sent.

    Args:
      strength: :math:`\lambda`, at least 0; may be traced.
      block_size: The coordinates of a block, a Python int of at least 1.
      mask: As for :func:`l1`.

    Returns:
      A regularizer for :func:`jaxcomm.proximal`, for leaves that are not sharded.

    Raises:
      ValueError: If `strength` is not a number of at least 0, or `block_size` not a Python int of
        at least 1; in a step, if parameters are sharded.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.compression.regularizers import block_lasso
      >>> print(block_lasso(1.0, 4).value(jnp.full((8,), 0.5)))
      4.0

    References:
      Yuan, Lin, `Model Selection and Estimation in Regression with Grouped Variables
      <https://doi.org/10.1111/j.1467-9868.2005.00532.x>`_, 2006.
    """

    def value_of(x: jax.Array) -> jax.Array:
        flat, whole = wide_of(x).ravel(), x.size // block_size * block_size
        return _norms(flat[:whole].reshape(-1, block_size)) + _norms(flat[None, whole:])

    threshold = partial(block_soft_threshold, block_size=block_size)
    return _of_leaves(strength, mask, threshold, value_of)
