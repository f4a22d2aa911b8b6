"""Runs an aggregator on n workers in the three modes, and shows every replica."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

import jaxcomm
from tests.slow import slow

Mode = Literal["checked", "unchecked", "vmap"]
# For parametrization: a law of its own compares what the modes compute, and most tests simulate.
MODE_ROWS = ["checked", slow("unchecked"), slow("vmap")]


def mesh_of(workers: int) -> Mesh:
    return jax.make_mesh(
        (workers,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:workers]
    )


def of_one_worker(updates: Any) -> Any:
    return jax.tree.map(lambda x: x[0], updates)


def count(updates: Any) -> int:
    return jax.tree.leaves(updates)[0].shape[0]


@functools.cache
def aggregator(tx: Any, workers: int, mode: Mode, weighted: bool = False) -> Any:
    """`(updates [n, ...], state, weights [n]) -> (results [n, ...], state)`, jitted.

    Results hold every worker's replica, so that tests can compare them.
    """

    def one(updates: Any, state: Any, weight: jax.Array) -> Any:
        extra = {"weight": weight} if weighted else {}
        return tx.update(updates, state, **extra)

    if mode == "vmap":

        def simulated(updates: Any, state: Any, weights: jax.Array) -> Any:
            axes = jax.tree.map(lambda s: 0 if s else None, jaxcomm.state_specs(state))
            local = jax.tree.map(
                lambda a, x: x if a is None else x[:, None],
                axes,
                state,
                is_leaf=lambda a: a is None,
            )
            results, after = jax.vmap(
                one, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name="data"
            )(updates, local, weights)
            after = jax.tree.map(
                lambda a, x: x if a is None else x[:, 0], axes, after, is_leaf=lambda a: a is None
            )
            return results, after

        return jax.jit(simulated)

    def on_mesh(updates: Any, state: Any, weights: jax.Array) -> Any:
        specs = jaxcomm.state_specs(state)

        def local(updates: Any, state: Any, weights: jax.Array) -> Any:
            results, state = one(of_one_worker(updates), state, weights[0])
            return jax.tree.map(lambda x: x[None], results), state

        return jax.shard_map(
            local,
            mesh=mesh_of(workers),
            in_specs=(PartitionSpec("data"), specs, PartitionSpec("data")),
            out_specs=(PartitionSpec("data"), specs),
            check_vma=mode == "checked",
        )(updates, state, weights)

    return jax.jit(on_mesh)


def initial(tx: Any, updates: Any, mode: Mode) -> Any:
    leaves, treedef = jax.tree.flatten(jax.eval_shape(of_one_worker, updates))
    return _initial(tx, count(updates), mode == "vmap", treedef, tuple(leaves))


@functools.cache
def _initial(tx: Any, workers: int, simulated: bool, treedef: Any, leaves: tuple[Any, ...]) -> Any:
    params = treedef.unflatten(jnp.asarray(np.zeros(leaf.shape, leaf.dtype)) for leaf in leaves)
    return jaxcomm.init(tx, params, workers if simulated else mesh_of(workers))


def abstract(tx: Any, updates: Any, mode: Mode) -> Any:
    """The shapes of the first state, for tests that only trace."""
    params, workers = jax.eval_shape(of_one_worker, updates), count(updates)
    laid_out = workers if mode == "vmap" else mesh_of(workers)
    return jax.eval_shape(lambda params: jaxcomm.init(tx, params, laid_out), params)


def aggregate(tx: Any, updates: Any, mode: Mode = "vmap", weights: Any = None) -> Any:
    """One update from the first state: every worker's replica of the mean, NumPy float64."""
    workers = count(updates)
    run = aggregator(tx, workers, mode, weighted=weights is not None)
    given = np.asarray(np.ones(workers) if weights is None else weights, np.float32)
    results, _ = run(updates, initial(tx, updates, mode), given)
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), results)


def draws(tx: Any, updates: Any, steps: int) -> np.ndarray:
    """The results of `steps` updates of the same gradients, [steps, coordinates]."""
    run = _drawing(tx, count(updates), steps)
    return np.asarray(run(updates, initial(tx, updates, "vmap")), np.float64)


@functools.cache
def _drawing(tx: Any, workers: int, steps: int) -> Any:
    run, ones = aggregator(tx, workers, "vmap"), jnp.ones(workers)

    def draw(updates: Any, state: Any) -> jax.Array:
        def body(state: Any, _: None) -> Any:
            results, state = run(updates, state, ones)
            leaves = [x[0].astype(jnp.float32).ravel() for x in jax.tree.leaves(results)]
            return state, jnp.concatenate(leaves)

        return jax.lax.scan(body, state, None, length=steps)[1]

    return jax.jit(draw)


def flat(tree: Any) -> np.ndarray:
    """Every worker's tree as one row: [n, coordinates], float64."""
    leaves = [np.asarray(x).astype(np.float64) for x in jax.tree.leaves(tree)]
    return np.concatenate([x.reshape(x.shape[0], -1) for x in leaves], axis=1)


def gradients(workers: int, seed: int = 0, dtype: Any = jnp.float32) -> Any:
    """A small tree of unlike leaves, one a worker, drawn by NumPy."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(workers, *shape)), dtype)  # noqa: E731
    return {"bias": draw(3), "kernel": draw(5, 2), "scale": draw()}


SIZES = [3, 10, 1]
# Of updates that are one leaf: where a law does not depend on the shape, its program is shared.
ONE_LEAF = (3, 5)


def one_leaf(seed: int = 0) -> jax.Array:
    """Every worker's update, of the one shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=ONE_LEAF), jnp.float32)
