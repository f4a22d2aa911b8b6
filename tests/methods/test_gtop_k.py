"""The tree of pairs against one written by hand, and that nothing is lost in it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from tests.slow import slow
from tests.workers import MODE_ROWS, Mode, aggregate, aggregator, initial

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


def check_against_the_tree(workers: int, mode: Mode) -> None:
    updates = np.random.default_rng(workers).normal(size=(STEPS, workers, SIZE)).astype(np.float32)
    run, state = aggregator(TX, workers, mode), initial(TX, jnp.asarray(updates[0]), mode)
    kept, given, sent = np.zeros((workers, SIZE)), np.zeros(SIZE), np.zeros(SIZE)
    for step in updates:
        results, state = run(jnp.asarray(step), state, jnp.ones(workers))
        results = np.asarray(results, np.float64)
        expected, kept = tree(kept + step)
        np.testing.assert_allclose(workers * results[0], expected, atol=1e-5)
        np.testing.assert_array_equal(results, np.tile(results[0], (workers, 1)))
        assert np.count_nonzero(results[0]) <= COUNT
        residuals = np.asarray(state.own.per_worker["data"][0].kept, np.float64)
        np.testing.assert_allclose(residuals, kept, atol=1e-5)
        given, sent = given + step.sum(axis=0), sent + workers * results[0]
        # Not a bound but an identity: whatever was dropped is in some worker's residual.
        np.testing.assert_allclose(sent + residuals.sum(axis=0), given, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [5, slow(1), slow(2), slow(3), slow(8)])
def test_against_a_tree_by_hand(workers: int) -> None:
    check_against_the_tree(workers, "checked")


@pytest.mark.parametrize(("workers", "mode"), [slow(5, "unchecked"), (3, "vmap"), slow(13, "vmap")])
def test_against_a_tree_by_hand_elsewhere(workers: int, mode: Mode) -> None:
    check_against_the_tree(workers, mode)


@pytest.mark.slow
def test_one_worker_is_top_k_with_error_feedback() -> None:
    alone = jaxcomm.all_gather_mean(error_feedback(top_k(k=COUNT)))
    updates = np.random.default_rng(0).normal(size=(4, 1, SIZE)).astype(np.float32)
    states = [initial(tx, jnp.asarray(updates[0]), "vmap") for tx in (TX, alone)]
    for step in updates:
        (mine, states[0]), (other, states[1]) = (
            aggregator(tx, 1, "vmap")(jnp.asarray(step), state, jnp.ones(1))
            for tx, state in zip((TX, alone), states, strict=True)
        )
        np.testing.assert_array_equal(mine, other)
    assert len(jax.tree.leaves(states[0])) == len(jax.tree.leaves(states[1]))


def test_a_coordinate_that_survives_elsewhere_loses_nothing() -> None:
    """Dropped in the pair of 0 and 1, index 0 comes through that of 2 and 3."""
    updates = np.array([[0.0, 4.0], [3.0, 0.0], [7.0, 0.0], [0.0, 0.0]], np.float32)
    tx = jaxcomm.gtop_k(k=1)
    run, state = aggregator(tx, 4, "vmap"), initial(tx, jnp.asarray(updates), "vmap")
    results, state = run(jnp.asarray(updates), state, jnp.ones(4))
    np.testing.assert_array_equal(4 * results[0], [7.0, 0.0])
    kept = state.own.per_worker["data"][0].kept
    np.testing.assert_array_equal(kept, [[3.0, 4.0], [0, 0], [0, 0], [0, 0]])


@pytest.mark.parametrize("mode", MODE_ROWS)
def test_a_nan_is_seen_everywhere_and_remembered_nowhere(mode: Mode) -> None:
    updates = jnp.asarray(np.random.default_rng(4).normal(size=(3, SIZE)), jnp.float32)
    run = aggregator(TX, 3, mode)
    _, before = run(updates, initial(TX, updates, mode), jnp.ones(3))
    results, after = run(updates.at[2, 3].set(jnp.nan), before, jnp.ones(3))
    assert np.isnan(np.asarray(results)).all()
    residuals = [state.own.per_worker["data"][0].kept for state in (before, after)]
    np.testing.assert_array_equal(*residuals)


@pytest.mark.slow
def test_of_each_leaf_and_of_weights() -> None:
    tx = jaxcomm.gtop_k(ratio=0.25, scope="leaf")
    rng = np.random.default_rng(5)
    updates = {
        "matrix": jnp.asarray(rng.normal(size=(3, 4, 5)), jnp.float32),
        "empty": jnp.zeros((3, 0)),
        "scalar": jnp.asarray([1.0, 2.0, 6.0]),
    }
    results = aggregate(tx, updates, "checked", weights=[1.0, 1.0, 2.0])
    np.testing.assert_allclose(results["scalar"], (1 + 2 + 2 * 6) / 4, rtol=1e-6)
    assert np.count_nonzero(results["matrix"][0]) == COUNT and results["empty"].shape == (3, 0)
    weighed = np.asarray(updates["matrix"]).reshape(3, 20) * np.array([[0.75], [0.75], [1.5]])
    expected, _ = tree(weighed)
    np.testing.assert_allclose(results["matrix"][0].ravel(), expected / 3, atol=1e-6)


@pytest.mark.slow
def test_sums_of_the_largest_floats_have_a_mean() -> None:
    largest = jnp.finfo(jnp.float32).max
    result = aggregate(TX, jnp.full((5, 3), largest))
    np.testing.assert_allclose(result, largest, rtol=1e-6)


def test_bad_options() -> None:
    for options in ({}, {"k": 1, "ratio": 0.1}, {"k": 0}, {"ratio": 1.5}):
        with pytest.raises(ValueError, match=r"`k`|`ratio`"):
            jaxcomm.gtop_k(**options)
