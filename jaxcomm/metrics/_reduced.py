"""Metrics that workers reduce by a sum or an extreme, in place of the mean."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PyTree

Operation: TypeAlias = Literal["sum", "max", "min"]

_OF_TWO: dict[Operation, Callable[..., jax.Array]] = {
    "sum": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reduced:
    """A metric, and the operation by which devices and workers reduce it."""

    value: jax.Array
    by: Operation = dataclasses.field(metadata={"static": True})


def _widened(value: Any) -> jax.Array:
    x = jnp.asarray(value)
    if x.dtype.itemsize >= 4:
        return x
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return x.astype(jnp.uint32)
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)


def _reduced(value: PyTree, by: Operation) -> PyTree:
    return jax.tree.map(lambda x: Reduced(_widened(x), by), value)


def sum(value: PyTree) -> PyTree:
    r"""A metric that is the sum over workers, such as a number of correct predictions.

    .. math:: m = \sum_i m_i

    The sum is over all devices of all workers, and over all mini-batches or parts that a worker
    adds up in one step. Weights of workers do not scale it: a worker of weight 0 counts too. On
    each worker, sum over its rows first. Workers send 4 bytes per number, in the all-reduce of the
    means if it is float32.

    Args:
      value: A number or array of this worker, or a tree of them. Integers keep their dtype, of at
        least 32 bits, and wrap when they overflow; bools count as 0 and 1. Floats are summed in at
        least float32.

    Returns:
      An entry of the aux that the loss returns with `has_aux=True`.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> def loss(w, x):
      ...     return jnp.mean((w - x) ** 2), {"positive": jaxcomm.metrics.sum(jnp.sum(x > 0))}
      >>> tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
      >>> step = jaxcomm.simulate(loss, tx, 2, has_aux=True)
      >>> w, x = jnp.float32(0), jnp.array([1.0, 2.0, 3.0, -4.0])
      >>> print(step(w, jaxcomm.init(tx, w, 2), x)[2]["positive"])
      3
    """
    return _reduced(value, "sum")


def max(value: PyTree) -> PyTree:
    r"""A metric that is the maximum over workers, such as the largest error of an example.

    .. math:: m = \max_i m_i

    It is NaN if it is NaN on any worker, also on one of weight 0. A worker that has no rows should
    return :math:`-\infty`. Workers send 4 bytes per number, in one all-reduce for all extremes of
    one size.

    Args:
      value: As for :func:`jaxcomm.metrics.sum`.

    Returns:
      An entry of the aux that the loss returns with `has_aux=True`.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> def loss(w, x):
      ...     errors = (w - x) ** 2
      ...     return jnp.mean(errors), {"worst": jaxcomm.metrics.max(jnp.max(errors))}
      >>> tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
      >>> step = jaxcomm.simulate(loss, tx, 2, has_aux=True)
      >>> w, x = jnp.float32(0), jnp.array([1.0, 2.0, 3.0, -4.0])
      >>> print(step(w, jaxcomm.init(tx, w, 2), x)[2]["worst"])
      16.0
    """
    return _reduced(value, "max")


def min(value: PyTree) -> PyTree:
    r"""A metric that is the minimum over workers.

    .. math:: m = \min_i m_i

    Args:
      value: As for :func:`jaxcomm.metrics.sum`.

    Returns:
      An entry of the aux that the loss returns with `has_aux=True`, as :func:`jaxcomm.metrics.max`
      with the opposite order. A worker that has no rows should return :math:`\infty`.

    Example:
      >>> import jaxcomm
      >>> jaxcomm.metrics.min(2.5).by
      'min'
    """
    return _reduced(value, "min")


def is_reduced(node: object) -> bool:
    """Whether a node of a tree of metrics states how it is reduced."""
    return isinstance(node, Reduced)


def require_stated(aux: PyTree) -> None:
    """Raises a ValueError if an integer does not state how workers reduce it.

    Its mean would not be an integer: 14 correct predictions on 8 workers would be 1.75. Bools are
    fractions: their mean is a share of the workers.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(aux, is_leaf=is_reduced):
        kind = getattr(x, "dtype", None) or np.asarray(x).dtype
        if is_reduced(x) or not jnp.issubdtype(kind, jnp.integer):
            continue
        name = getattr(path[-1], "key", "count") if path else "count"
        raise ValueError(
            f"`aux{jax.tree_util.keystr(path)}` is {kind}: return `jaxcomm.metrics.sum({name})`, "
            f"`max` or `min` of it, or `jnp.float32({name})` for its mean over workers."
        )


def separate(metrics: PyTree) -> tuple[PyTree, PyTree]:
    """The means among metrics, and the other metrics, each with None in place of the others."""

    def only(wanted: bool) -> PyTree:
        return jax.tree.map(
            lambda x: x if is_reduced(x) == wanted else None, metrics, is_leaf=is_reduced
        )

    return only(False), only(True)


def together(means: PyTree, others: PyTree) -> PyTree:
    """The inverse of `separate`."""
    return jax.tree.map(
        lambda x, y: y if x is None else x,
        means,
        others,
        is_leaf=lambda node: node is None or is_reduced(node),
    )


def none_yet(like: PyTree, zeros: Callable[[Any], jax.Array]) -> PyTree:
    """The metrics of no rows, to which those of parts are `added`.

    Args:
      like: The metrics of a part, or their shapes.
      zeros: The function from a shape to zeros.
    """

    def bound(x: jax.Array, by: Operation) -> jax.Array:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        limits = (
            (-jnp.inf, jnp.inf) if floating else (jnp.iinfo(x.dtype).min, jnp.iinfo(x.dtype).max)
        )
        return jnp.full_like(x, limits[by == "min"])

    def neutral(x: Any) -> Any:
        if not is_reduced(x):
            return zeros(x)
        own = zeros(x.value)
        return Reduced(own if x.by == "sum" else bound(own, x.by), x.by)

    return jax.tree.map(neutral, like, is_leaf=is_reduced)


def added(one: PyTree, other: PyTree) -> PyTree:
    """The metrics of two parts of a worker's rows; means are added, not divided."""
    return jax.tree.map(
        lambda x, y: (
            Reduced(_OF_TWO[x.by](x.value, y.value), x.by) if is_reduced(x) else jnp.add(x, y)
        ),
        one,
        other,
        is_leaf=is_reduced,
    )


def divided(metrics: PyTree, parts: Any) -> PyTree:
    """The metrics of all parts, from those that were `added`: means are divided by `parts`."""
    means, others = separate(metrics)
    return together(jax.tree.map(lambda x: x / parts, means), others)


def _flipped(bits: jax.Array) -> jax.Array:
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _ordered(x: jax.Array, by: Operation) -> jax.Array:
    """Integers in the order of `x`, NaN above all others; in the opposite order for `"min"`."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return ~x if by == "min" else x
    x = jnp.where(jnp.isnan(x), jnp.nan, -x if by == "min" else x)
    return _flipped(lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}")))


def _from_ordered(bits: jax.Array, dtype: Any, by: Operation) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.integer):
        return ~bits if by == "min" else bits
    x = lax.bitcast_convert_type(_flipped(bits), dtype)
    return -x if by == "min" else x


def over_axes(metrics: PyTree, axis_name: AxisName) -> PyTree:
    """Sums and extremes over devices, of a tree of `Reduced` nodes.

    The sums of one dtype travel in one all-reduce, and so do the extremes of one size. Extremes of
    floats travel as integers, since a maximum of floats may drop NaN.
    """
    names = _axis.names(axis_name)
    leaves, treedef = jax.tree.flatten(metrics, is_leaf=is_reduced)
    own = [_axis.as_varying(x.value, axis_name) for x in leaves]
    sums = [x for x, node in zip(own, leaves, strict=True) if node.by == "sum"]
    tops = [_ordered(x, node.by) for x, node in zip(own, leaves, strict=True) if node.by != "sum"]
    totals = iter(lax.psum(sums, names) if sums else [])
    extremes = iter(lax.pmax(tops, names) if tops else [])
    found = [
        next(totals) if node.by == "sum" else _from_ordered(next(extremes), x.dtype, node.by)
        for x, node in zip(own, leaves, strict=True)
    ]
    return jax.tree.unflatten(
        treedef, [Reduced(x, node.by) for x, node in zip(found, leaves, strict=True)]
    )


def values_of(metrics: PyTree) -> PyTree:
    """The values of a tree of metrics, without how they are reduced."""
    return jax.tree.map(lambda x: x.value if is_reduced(x) else x, metrics, is_leaf=is_reduced)
