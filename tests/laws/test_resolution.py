"""No coordinate is farther from the mean than the method's resolution, whatever the input."""

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import MEANS, Case, rows, rows_by_workers
from tests.workers import ONE_LEAF, Mode, aggregate, aggregator, flat, gradients, initial


def check_resolution(case: Case, workers: int, mode: Mode = "vmap") -> None:
    updates = gradients(workers)
    close_to_the_mean(case, flat(updates), flat(aggregate(case.make(), updates, mode)))


def close_to_the_mean(case: Case, given: np.ndarray, results: np.ndarray) -> None:
    workers, coordinates = given.shape
    peak = np.abs(given).max()
    bound = (case.resolution(workers, coordinates) + workers * 2.0**-22) * peak + 1e-37
    assert np.abs(results - given.mean(axis=0)).max() <= bound


@pytest.mark.parametrize(
    ("case", "workers"), rows_by_workers(MEANS, [4], [], (1, 2, 3, 5, 8)), ids=repr
)
def test_resolution_on_a_mesh(case: Case, workers: int) -> None:
    check_resolution(case, workers, "checked")


@pytest.mark.parametrize(("case", "workers"), rows_by_workers(MEANS, [16], [], (64,)), ids=repr)
@pytest.mark.filterwarnings("ignore:`bits`=8 leaves:UserWarning")
def test_resolution_simulated(case: Case, workers: int) -> None:
    check_resolution(case, workers)


@pytest.mark.parametrize("case", rows(MEANS), ids=repr)
def test_resolution_of_any_input(case: Case) -> None:
    tx, shape = case.make(), ONE_LEAF
    state = initial(tx, jnp.zeros(shape), "vmap")
    ones = np.ones(shape[0], np.float32)
    run = aggregator(tx, shape[0], "vmap")
    magnitudes = st.floats(2.0**-60, 2.0**60, width=32)
    numbers = st.just(0.0) | magnitudes | magnitudes.map(lambda x: -x)

    @hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @hypothesis.given(hypothesis.extra.numpy.arrays(np.float32, shape, elements=numbers))
    def holds(given: np.ndarray) -> None:
        results, _ = run(jnp.asarray(given), state, ones)
        close_to_the_mean(case, given.astype(np.float64), np.asarray(results, np.float64))

    holds()
