"""A restored state for another number of workers."""

from typing import Any

import jax
import numpy as np

from jaxcomm._base import AxisName, PerWorker, PyTree
from jaxcomm._per_worker import consensus, replicate
from jaxcomm._resize import place, resize_workers


def resized(
    state: PyTree,
    start: PyTree,
    tx: Any,
    workers: Any,
    axis_name: AxisName,
) -> PyTree:
    """The state for the workers of `start`.

    Parameters and optimizer state follow :func:`jaxcomm.resize_workers`. Of the rest, a
    `PerWorker` starts from its consensus, and what is equal on all workers stays.

    Raises:
      ValueError: If `state` is no dict with `"params"` and `"opt_state"`, or cannot be resized.
    """
    if not isinstance(state, dict) or not {"params", "opt_state"} <= state.keys():
        raise ValueError('`start` must be a dict with "params" and "opt_state"')
    opt_state, params = resize_workers(
        tx, state["opt_state"], state["params"], workers, axis_name=axis_name
    )

    def other(old: Any, new: Any) -> Any:
        if isinstance(old, PerWorker):
            return replicate(jax.tree.map(np.asarray, consensus(old)), workers, axis_name=axis_name)
        return place(old, new.sharding) if isinstance(new, jax.Array) else old

    is_marked = lambda x: isinstance(x, PerWorker)  # noqa: E731
    rest = {
        name: jax.tree.map(other, state[name], start[name], is_leaf=is_marked)
        for name in state
        if name not in ("params", "opt_state")
    }
    return {**rest, "params": params, "opt_state": opt_state}
