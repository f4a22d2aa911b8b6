"""The tree of pairs against one written by hand, and that nothing is lost in it."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from tests.slow import slow
from tests.steps import memory_of, steps
from tests.workers import aggregate

SIZE, COUNT, STEPS = 20, 5, 10
TX = jaxcomm.gtop_k(k=COUNT)


def top(x: np.ndarray, count: int = COUNT) -> np.ndarray:
    kept = np.zeros_like(x)
    largest = np.argsort(-np.abs(x), kind="stable")[:count]
    kept[largest] = x[largest]
    return kept


def tree(total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What is left of the sum, and what each worker keeps back. Blocks merge into their first."""
    held = {worker: top(row) for worker, row in enumerate(total)}
    kept = total - np.stack([held[worker] for worker in range(len(total))])
    distance = 1
    while distance < len(total):
        for leader in range(0, len(total), 2 * distance):
            if leader + distance in held:
                both = held[leader] + held.pop(leader + distance)
                held[leader] = top(both)
                kept[leader] += both - held[leader]
        distance *= 2
    (root,) = held
    return held[root], kept


@pytest.mark.parametrize("workers", [3, slow(1), slow(5), slow(13)])
def test_against_a_tree_by_hand(workers: int) -> None:
    updates = np.random.default_rng(workers).normal(size=(STEPS, workers, SIZE)).astype(np.float32)
    found, states = steps(TX, updates)
    residuals = np.asarray(memory_of(states).kept, np.float64).reshape(updates.shape)
    kept = np.zeros((workers, SIZE))
    for step, results, residual in zip(updates, found, residuals, strict=True):
        expected, kept = tree(kept + step)
        np.testing.assert_array_equal(results, np.tile(results[0], (workers, 1)))
        np.testing.assert_allclose(workers * results[0], expected, atol=1e-5)
        np.testing.assert_allclose(residual, kept, atol=1e-5)
        assert np.count_nonzero(results[0]) <= COUNT
    # Not a bound but an identity: whatever was dropped is in some worker's residual.
    sent = workers * found[:, 0].astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(
        sent + residuals[-1].sum(axis=0), updates.sum(axis=(0, 1)), atol=1e-4
    )


@pytest.mark.slow
def test_means_of_the_largest_floats_are_finite() -> None:
    largest = jnp.finfo(jnp.float32).max
    result = aggregate(TX, jnp.full((5, 3), largest))
    np.testing.assert_allclose(result, largest, rtol=1e-6)
