"""Runs an aggregator on n workers in three modes and returns every replica."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxcomm._axis import state_specs
from jaxcomm._contract import PyTree
from jaxcomm._workers import init

Mode = Literal["checked", "unchecked", "vmap"]


def mesh_of(workers: int, axis_name: str = "data") -> Mesh:
    """Returns a mesh of the first devices."""
    return jax.make_mesh(
        (workers,), (axis_name,), axis_types=(AxisType.Auto,), devices=jax.devices()[:workers]
    )


def of_one_worker(updates: PyTree) -> PyTree:
    """Returns the first worker's tree of leaves [workers, ...]."""
    return jax.tree.map(lambda x: x[0], updates)


def count(updates: PyTree) -> int:
    """Returns the number of workers of leaves [workers, ...]."""
    workers: int = jax.tree.leaves(updates)[0].shape[0]
    return workers


def program(
    tx: Any, workers: int, mode: Mode, weighted: bool = False, axis_name: str = "data"
) -> Any:
    """Returns `(updates [n, ...], state, weights [n]) -> (results [n, ...], state)`, not jitted.

    Results hold every worker's replica, so that tests can compare them.
    """

    def one(updates: PyTree, state: PyTree, weight: jax.Array) -> Any:
        extra = {"weight": weight} if weighted else {}
        return tx.update(updates, state, **extra)

    if mode == "vmap":

        def simulated(updates: PyTree, state: PyTree, weights: jax.Array) -> Any:
            axes = jax.tree.map(lambda s: 0 if s else None, state_specs(state))
            local = jax.tree.map(
                lambda a, x: x if a is None else x[:, None],
                axes,
                state,
                is_leaf=lambda a: a is None,
            )
            results, after = jax.vmap(
                one, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=axis_name
            )(updates, local, weights)
            after = jax.tree.map(
                lambda a, x: x if a is None else x[:, 0], axes, after, is_leaf=lambda a: a is None
            )
            return results, after

        return simulated

    def on_mesh(updates: PyTree, state: PyTree, weights: jax.Array) -> Any:
        specs = state_specs(state)

        def local(updates: PyTree, state: PyTree, weights: jax.Array) -> Any:
            results, state = one(of_one_worker(updates), state, weights[0])
            return jax.tree.map(lambda x: x[None], results), state

        return jax.shard_map(
            local,
            mesh=mesh_of(workers, axis_name),
            in_specs=(PartitionSpec(axis_name), specs, PartitionSpec(axis_name)),
            out_specs=(PartitionSpec(axis_name), specs),
            check_vma=mode == "checked",
        )(updates, state, weights)

    return on_mesh


def aggregator(
    tx: Any, workers: int, mode: Mode, weighted: bool = False, axis_name: str = "data"
) -> Any:
    """Returns the jitted program, from a cache."""
    return _jitted(tx, workers, mode, weighted, axis_name)


@functools.cache
def _jitted(tx: Any, workers: int, mode: Mode, weighted: bool, axis_name: str) -> Any:
    return jax.jit(program(tx, workers, mode, weighted, axis_name))


def initial(tx: Any, updates: PyTree, mode: Mode, axis_name: str = "data") -> Any:
    """Returns the initial state for updates [workers, ...]."""
    leaves, treedef = jax.tree.flatten(jax.eval_shape(of_one_worker, updates))
    return _initial(tx, count(updates), mode == "vmap", axis_name, treedef, tuple(leaves))


@functools.cache
def _initial(
    tx: Any, workers: int, simulated: bool, axis_name: str, treedef: Any, leaves: tuple[Any, ...]
) -> Any:
    params = treedef.unflatten(jnp.asarray(np.zeros(leaf.shape, leaf.dtype)) for leaf in leaves)
    laid_out = workers if simulated else mesh_of(workers, axis_name)
    return init(tx, params, laid_out, axis_name=axis_name)


def draws(tx: Any, updates: PyTree, steps: int, axis_name: str = "data") -> np.ndarray:
    """Returns the results of `steps` updates of the same gradients, [steps, coordinates]."""
    run = _drawing(tx, count(updates), steps, axis_name)
    return np.asarray(run(updates, initial(tx, updates, "vmap", axis_name)), np.float64)


@functools.cache
def _drawing(tx: Any, workers: int, steps: int, axis_name: str) -> Any:
    run, ones = aggregator(tx, workers, "vmap", axis_name=axis_name), jnp.ones(workers)

    def draw(updates: PyTree, state: PyTree) -> jax.Array:
        def body(state: PyTree, _: None) -> Any:
            results, state = run(updates, state, ones)
            leaves = [x[0].astype(jnp.float32).ravel() for x in jax.tree.leaves(results)]
            return state, jnp.concatenate(leaves)

        return jax.lax.scan(body, state, None, length=steps)[1]

    return jax.jit(draw)
