"""What a transformation sends and keeps, from its traced program; nothing runs."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import wire
from jaxcomm._base import AxisName, PerWorker, PyTree
from jaxcomm._require import require_arrays, require_transformation
from jaxcomm._state import init
from jaxcomm.training import simulate


class Traced(NamedTuple):
    """A transformation on a number of workers.

    Attributes:
      account: What its step sends.
      state_bytes: The bytes of its state on one worker.
    """

    account: wire.Account
    state_bytes: float


def bytes_of_tree(tree: PyTree) -> int:
    """The bytes of all leaves."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def count_of_tree(tree: PyTree) -> int:
    """The number of coordinates of all leaves."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def shapes_of(params: PyTree) -> PyTree:
    """The shapes and dtypes of parameters.

    Raises:
      ValueError: If a leaf is not an array, or there is none.
    """
    require_arrays(params, "params")
    if not jax.tree.leaves(params):
        raise ValueError("`params` must have at least one array, got an empty tree.")
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)


def _loss(params: PyTree, batch: jax.Array) -> jax.Array:
    """A loss that sends nothing by itself; the account would count equal gradients once."""
    total = sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(params))
    return total * jnp.mean(batch)


def _own_bytes(leaf: Any) -> float:
    """The bytes of one worker, of a leaf that may differ by worker."""
    if not isinstance(leaf, PerWorker):
        return bytes_of_tree(leaf)
    return sum(bytes_of_tree(each) / each.shape[0] for each in jax.tree.leaves(leaf))


def traced(
    tx: optax.GradientTransformation,
    params: PyTree,
    workers: int | Mapping[str, int],
    axis_name: AxisName,
) -> Traced:
    """Traces a step of `tx` on simulated workers.

    Raises:
      ValueError: If `tx` is not a transformation, or does not fit the axes.
    """
    require_transformation(tx)
    shapes = shapes_of(params)
    devices = workers if isinstance(workers, int) else math.prod(workers.values())
    state = jax.eval_shape(lambda params: init(tx, params, workers, axis_name=axis_name), shapes)
    step = simulate(_loss, tx, workers, axis_name=axis_name)
    batch = jax.ShapeDtypeStruct((devices,), jnp.float32)
    is_own = lambda leaf: isinstance(leaf, PerWorker)  # noqa: E731
    kept = sum(_own_bytes(leaf) for leaf in jax.tree.leaves(state, is_leaf=is_own))
    return Traced(wire.account(step, shapes, state, batch), kept)
