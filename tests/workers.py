"""Inputs of aggregators in tests, and one step of one; `jaxcomm.testing` runs them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm
from jaxcomm.testing._updates import rows_of as flat
from jaxcomm.testing._workers import (
    Mode,
    aggregator,
    count,
    draws,
    initial,
    mesh_of,
    of_one_worker,
)
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
    "mesh_of",
    "of_one_worker",
    "one_leaf",
]

# For parametrization: a separate law compares the results of the modes, and most tests simulate.
MODE_ROWS = ["checked", slow("unchecked"), slow("vmap")]


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


def gradients(workers: int, seed: int = 0, dtype: Any = jnp.float32) -> Any:
    """A small tree of different leaves per worker, drawn by NumPy."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(workers, *shape)), dtype)  # noqa: E731
    return {"bias": draw(3), "kernel": draw(5, 2), "scale": draw()}


SIZES = [3, 10, 1]
# For updates of one leaf: laws that do not depend on the shape share a program.
ONE_LEAF = (3, 5)


def one_leaf(seed: int = 0) -> jax.Array:
    """Every worker's update, of that shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=ONE_LEAF), jnp.float32)
