"""Runs an aggregator without a model, on simulated workers and on a mesh."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxcomm._axis import state_specs
from jaxcomm._contract import PyTree
from jaxcomm._workers import init
from jaxcomm.testing._law import LEAVES, rows_of, size_of, tree_of

Mode = Literal["checked", "unchecked", "vmap"]
Nonfinite = Literal["all", "coordinate"]


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
    return _initial(*_arguments(tx, updates, mode, axis_name))


def initial_types(tx: Any, updates: PyTree, mode: Mode, axis_name: str = "data") -> Any:
    """Returns its shapes and dtypes."""
    return _initial_types(*_arguments(tx, updates, mode, axis_name))


def _arguments(tx: Any, updates: PyTree, mode: Mode, axis_name: str) -> tuple[Any, ...]:
    leaves, treedef = jax.tree.flatten(jax.eval_shape(of_one_worker, updates))
    return tx, count(updates), mode == "vmap", axis_name, treedef, tuple(leaves)


def _uncached(
    tx: Any, workers: int, simulated: bool, axis_name: str, treedef: Any, leaves: tuple[Any, ...]
) -> Any:
    params = treedef.unflatten(jnp.asarray(np.zeros(leaf.shape, leaf.dtype)) for leaf in leaves)
    laid_out = workers if simulated else mesh_of(workers, axis_name)
    return init(tx, params, laid_out, axis_name=axis_name)


_initial = functools.cache(_uncached)


@functools.cache
def _initial_types(*arguments: Any) -> Any:
    return jax.eval_shape(lambda: _uncached(*arguments))


def own_leaves(state: PyTree) -> PyTree:
    """Returns the leaves that differ by worker."""
    specs = jax.tree.leaves(state_specs(state))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path): leaf
        for (path, leaf), spec in zip(leaves, specs, strict=True)
        if any(spec)
    }


def draws_of(tx: Any, updates: PyTree, steps: int, axis_name: str = "data") -> np.ndarray:
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


class AggregatorTrial(NamedTuple):
    """An aggregator, what it claims, and where it runs.

    Attributes:
      tx: The aggregator.
      workers: Their number.
      axis_name: The mesh axis over which `tx` averages.
      leaves: The shapes and dtypes of an update; None are `LEAVES`, and `MIXED` for laws of types.
      resolution: `(workers, coordinates) -> r`: no coordinate of the result is farther from the
        mean than `r` times the largest magnitude on any worker; None without a claim.
      unbiased: Whether the expectation of the result is the mean.
      variance: `(coordinates, workers) -> theta`, with `E|G - mean|^2 <= theta / n * sum |x_i|^2`.
      weighted: Whether `tx.update` takes `weight=`.
      silent: Whether coordinates that are zero on all workers are zero in the result.
      nonfinite: Where a non-finite coordinate of one worker shows.
      integers: Whether contributions are added as integers, so that modes agree bit for bit.
      random: Whether it draws.
      draws: How many steps are averaged.
    """

    tx: Any
    workers: int = 3
    axis_name: str = "data"
    leaves: PyTree = None
    resolution: Callable[[int, int], float] | None = None
    unbiased: bool = False
    variance: Callable[[int, int], float] | None = None
    weighted: bool = False
    silent: bool = True
    nonfinite: Nonfinite = "all"
    integers: bool = False
    random: bool = True
    draws: int = 2000

    @property
    def modes(self) -> list[Mode]:
        """The modes for which this machine has enough devices."""
        on_mesh: list[Mode] = ["checked", "unchecked"]
        return ["vmap", *(on_mesh if jax.device_count() >= self.workers else [])]

    @property
    def shapes(self) -> PyTree:
        """The shapes and dtypes of an update."""
        return LEAVES if self.leaves is None else self.leaves

    def normal(self, seed: int = 0) -> PyTree:
        """Returns normal updates, [workers, ...]."""
        size = (self.workers, size_of(self.shapes))
        return tree_of(self.shapes, np.random.default_rng(seed).normal(size=size))

    def first(self, updates: PyTree, mode: Mode = "vmap") -> PyTree:
        """Returns the initial state."""
        return initial(self.tx, updates, mode, self.axis_name)

    def first_types(self, updates: PyTree, mode: Mode = "vmap") -> PyTree:
        """Returns the shapes and dtypes of the initial state."""
        return initial_types(self.tx, updates, mode, self.axis_name)

    def step(
        self, updates: PyTree, state: PyTree, mode: Mode = "vmap", weights: Any = None
    ) -> tuple[PyTree, PyTree]:
        """Returns the results of all workers and the new state."""
        run = aggregator(self.tx, self.workers, mode, weights is not None, self.axis_name)
        given = np.ones(self.workers) if weights is None else weights
        found: tuple[PyTree, PyTree] = run(updates, state, np.asarray(given, np.float32))
        return found

    def result(self, updates: PyTree, mode: Mode = "vmap", weights: Any = None) -> np.ndarray:
        """Returns the results of the first step, [workers, coordinates] in float64."""
        return rows_of(self.step(updates, self.first(updates, mode), mode, weights)[0])

    def __str__(self) -> str:
        return f"with {self.workers} workers"
