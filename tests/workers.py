"""Inputs of aggregators in tests, and one step of one; `jaxcomm.testing` runs them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm.testing._aggregator import (
    Mode,
    aggregator,
    count,
    initial,
    mesh_of,
    of_one_worker,
)
from jaxcomm.testing._aggregator import (
    draws_of as draws,
)
from jaxcomm.testing._aggregator import (
    initial_types as abstract,
)
from jaxcomm.testing._law import rows_of as flat
from tests.slow import slow

__all__ = [
    "MODE_ROWS",
    "ONE_LEAF",
    "SIZES",
    "Mode",
    "abstract",
    "aggregate",
    "aggregator",
    "count",
    "draws",
    "flat",
    "gradients",
    "initial",
    "meshes_of",
    "mesh_of",
    "of_one_worker",
    "one_leaf",
    "towards",
    "trained_by_hand",
    "trained_by_steps",
]


# Another law compares the results of the modes.
MODE_ROWS = ["checked", slow("unchecked"), slow("vmap")]


def aggregate(tx: Any, updates: Any, mode: Mode = "vmap", weights: Any = None) -> Any:
    """One update from the first state: every worker's replica of the mean, NumPy float64."""
    workers = count(updates)
    run = aggregator(tx, workers, mode, weighted=weights is not None)
    given = np.asarray(np.ones(workers) if weights is None else weights, np.float32)
    results, _ = run(updates, initial(tx, updates, mode), given)
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), results)


def gradients(workers: int, seed: int = 0, dtype: Any = jnp.float32) -> Any:
    """A small tree of different leaves per worker, drawn by NumPy."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(workers, *shape)), dtype)  # noqa: E731
    return {"bias": draw(3), "kernel": draw(5, 2), "scale": draw()}


def towards(params: Any, targets: Any) -> jax.Array:
    """A loss whose gradient is the distance to the mean of the targets [rows, ...]."""
    squares = jax.tree.map(
        lambda x, y: jnp.sum(jnp.mean((x[None] - y) ** 2, axis=0)), params, targets
    )
    return 0.5 * sum(jax.tree.leaves(squares))


def meshes_of(workers: int) -> list[Mesh]:
    """Automatic axes on as many devices, and explicit ones, JAX's default."""
    devices = jax.devices()[:workers]
    return [mesh_of(workers), jax.make_mesh((workers,), ("data",), devices=devices)]


def _gradients(loss: Any, params: Any, batch: Any) -> Any:
    return jaxcomm.local_value_and_grad(loss)(params, batch)


def trained_by_hand(
    tx: Any, params: Any, batches: Any, mesh: Mesh, *, differ: bool = False, checked: bool = True
) -> Any:
    """Every worker's parameters after `tx.init` and a `lax.scan` of steps in one `shard_map`."""

    def train(params: Any, batches: Any) -> Any:
        own = jaxcomm.local_params(params) if differ else params

        def body(carry: Any, batch: Any) -> Any:
            params, state = carry
            grad = jax.grad(towards) if not checked else lambda *x: _gradients(towards, *x)[1]
            updates, state = tx.update(grad(params, batch), state, params)
            return (optax.apply_updates(params, updates), state), None

        (own, _), _ = jax.lax.scan(body, (own, tx.init(own)), batches)
        return jax.tree.map(lambda x: x[None], own)

    specs, out = (P(), P(None, "data")), P("data")
    run = jax.shard_map(train, mesh=mesh, in_specs=specs, out_specs=out, check_vma=checked)
    placed = jax.device_put((params, batches), tuple(NamedSharding(mesh, spec) for spec in specs))
    return jax.jit(run)(*placed)


def trained_by_steps(
    tx: Any, params: Any, batches: Any, mesh: Mesh, *, differ: bool = False
) -> Any:
    """The same by `jaxcomm.make_step` in a loop."""
    params = jaxcomm.replicate(params, mesh) if differ else params
    step = jaxcomm.make_step(towards, tx, mesh, gradients=_gradients, metrics="own", donate=False)
    state = jaxcomm.init(tx, params, mesh)
    for number in range(len(jax.tree.leaves(batches)[0])):
        batch = jax.tree.map(lambda x, number=number: x[number], batches)
        params, state, _ = step(params, state, batch)
    if differ:
        return params.per_worker["data"]
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (mesh.size, *x.shape)), params)


SIZES = [3, 10, 1]
# For updates of one leaf: laws that do not depend on the shape share a program.
ONE_LEAF = (3, 5)


def one_leaf(seed: int = 0) -> jax.Array:
    """Every worker's update, of that shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=ONE_LEAF), jnp.float32)
