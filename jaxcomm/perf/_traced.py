"""What a transformation sends and keeps, from its traced program; nothing runs."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import wire
from jaxcomm._contract import AxisName, PerWorker, PyTree
from jaxcomm._gradients import local_value_and_grad
from jaxcomm._require import require_arrays, require_transformation
from jaxcomm._workers import init
from jaxcomm.training import simulate


class Traced(NamedTuple):
    """A transformation on a number of workers.

    Attributes:
      account: What its step sends.
      state_bytes: The bytes of its state on one worker.
    """

    account: wire.Account
    state_bytes: float


def _own(tree: PyTree, size: Callable[[Any], float]) -> float:
    """A sum over the leaves of one worker; leaves that differ by worker have all workers'."""
    total = 0.0
    for node in jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, PerWorker)):
        for leaf in jax.tree.leaves(node):
            total += size(leaf) / (leaf.shape[0] if isinstance(node, PerWorker) else 1)
    return total


def bytes_of_tree(tree: PyTree) -> float:
    """The bytes of all leaves, of one worker."""
    return _own(tree, lambda leaf: math.prod(leaf.shape) * leaf.dtype.itemsize)


def count_of_tree(tree: PyTree) -> int:
    """The number of coordinates of all leaves, of one worker."""
    return round(_own(tree, lambda leaf: math.prod(leaf.shape)))


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
    # `gradients=`, since the loss does not mark the layers of `wait_free`: they send as much.
    gradients = local_value_and_grad(_loss, axis_name=axis_name)
    step = simulate(
        _loss, tx, workers, axis_name=axis_name, gradients=lambda _, *args: gradients(*args)
    )
    batch = jax.ShapeDtypeStruct((devices,), jnp.float32)
    return Traced(wire.account(step, shapes, state, batch), bytes_of_tree(state))
