"""Runs an aggregator for some steps, in one program."""

from typing import Any

import jax
import numpy as np


def traced(tx: Any, given: Any) -> tuple[Any, Any]:
    """The results [steps, workers, ...] of updates of these shapes, and the state after each."""

    def worker(updates: Any) -> Any:
        def step(state: Any, update: Any) -> Any:
            result, state = tx.update(update, state)
            return state, (result, state)

        first = jax.tree.map(lambda x: x[0], updates)
        return jax.lax.scan(step, tx.init(first), updates)[1]

    return jax.vmap(worker, in_axes=1, out_axes=1, axis_name="data")(given)


def steps(tx: Any, given: Any) -> tuple[Any, Any]:
    """The same, compiled, with results as NumPy arrays."""
    results, states = jax.jit(lambda given: traced(tx, given))(given)
    return jax.tree.map(np.asarray, results), states


def last(states: Any) -> Any:
    """The state after the last step."""
    return jax.tree.map(lambda x: x[-1], states)


def memory_of(states: Any) -> Any:
    """Each worker's memory of the only unit."""
    (memory,) = states.own.per_worker["data"]
    return memory
