"""Whether a checkpoint fits a state, and a restored state for another number of workers."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxcomm._contract import AxisName, PerWorker, PyTree
from jaxcomm._resize import place, resize_workers
from jaxcomm._workers import consensus, replicate
from jaxcomm.checkpoint._arrays import CheckpointError, Entry
from jaxcomm.synchronization import StaleParams, redeal, resize_clock
from jaxcomm.synchronization._clock import Clock
from jaxcomm.synchronization._deal import Deal

_PER_WORKER = re.compile(r"\.per_worker\['[^']*'\]|\['per_worker'\]\['[^']*'\]")


def _is_by_worker(node: Any) -> bool:
    return isinstance(node, Clock | Deal | StaleParams)


def _by_worker(state: PyTree) -> set[str]:
    """The paths of leaves in nodes that have a row per worker, and a rule for other workers."""
    nodes = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_by_worker)
    return {
        jax.tree_util.keystr((*path, *inner))
        for path, node in nodes
        if _is_by_worker(node)
        for inner, _ in jax.tree_util.tree_leaves_with_path(node)
    }


def other_workers(
    saved: Mapping[str, Entry], start: Mapping[str, Entry], state: PyTree, where: str
) -> tuple[int, int] | None:
    """The numbers of workers of a checkpoint and of `state`, or None if they are equal.

    `start` describes the leaves of `state`.

    Raises:
      CheckpointError: If a leaf is missing in one of them, has another dtype, or is equal on all
        workers and has another shape.
    """
    advice = "It is of another model, method or version: restore with the program that saved it."
    for path in [*start, *saved]:
        if path not in saved or path not in start:
            how = "has" if path in saved else "lacks"
            raise CheckpointError(f"{where} {how} the leaf `{path}`, unlike this program. {advice}")
    by_worker = _by_worker(state)
    of_workers = [path for path in saved if path in by_worker or _PER_WORKER.search(path)]
    rows = [(saved[path].shape[:1], start[path].shape[:1]) for path in of_workers]
    others = [(*old, *new) for old, new in rows if old and new and old != new]
    for path, entry in saved.items():
        fits = entry.shape == start[path].shape or (others and path in of_workers)
        if entry.dtype != start[path].dtype or not fits:
            raise CheckpointError(
                f"{where} has the leaf `{path}` as {entry}, and this program has {start[path]}. "
                f"{advice}"
            )
    return (others[0][0], others[0][1]) if others else None


def _stale(params: PyTree, workers: int) -> PyTree:
    """Each worker's parameters, `[workers, ...]`."""
    if isinstance(params, PerWorker):
        (own,) = params.per_worker.values()
        return own
    return jax.tree.map(lambda x: np.broadcast_to(np.asarray(x), (workers, *x.shape)), params)


def resized(state: PyTree, start: PyTree, tx: Any, workers: Any, axis_name: AxisName) -> PyTree:
    """The state for the workers of `start`.

    Parameters and optimizer state follow :func:`jaxcomm.resize_workers`. Of the rest, a
    `PerWorker` starts from its consensus; clocks and deals of examples go on, with nothing in
    flight; and what is equal on all workers stays.

    Raises:
      KeyError: If `state` is no dict with `"params"` and `"opt_state"`.
      ValueError: If it cannot be resized.
    """
    opt_state, params = resize_workers(
        tx, state["opt_state"], state["params"], workers, axis_name=axis_name
    )

    def other(old: Any, new: Any) -> Any:
        if _is_by_worker(old):
            if isinstance(old, Clock):
                node: Any = resize_clock(old, len(new.queue.position))
            elif isinstance(old, Deal):
                node = redeal(old, len(new.taken))
            else:
                count = len(jax.tree.leaves(new)[0])
                node = StaleParams(_stale(jax.tree.map(np.asarray, params), count))
            return jax.tree.map(other, node, new)
        if isinstance(old, PerWorker):
            return replicate(jax.tree.map(np.asarray, consensus(old)), workers, axis_name=axis_name)
        return place(old, new.sharding) if isinstance(new, jax.Array) else old

    is_marked = lambda x: isinstance(x, PerWorker) or _is_by_worker(x)  # noqa: E731
    rest = {
        name: jax.tree.map(other, state[name], start[name], is_leaf=is_marked)
        for name in state
        if name not in ("params", "opt_state")
    }
    return {**rest, "params": params, "opt_state": opt_state}
