"""No coordinate is farther from the mean than the method's resolution, whatever the input."""

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxcomm.testing._law import rows_of, size_of, tree_of
from tests.cases import MEANS, Case

WORKERS = 3


def close_to_the_mean(case: Case, given: np.ndarray, results: np.ndarray) -> None:
    workers, coordinates = given.shape
    peak = np.abs(given).max()
    bound = (case.resolution(workers, coordinates) + workers * 2.0**-22) * peak + 1e-37
    assert np.abs(results - given.mean(axis=0)).max() <= bound


@pytest.mark.parametrize("case", MEANS, ids=repr)
def test_resolution_of_any_input(case: Case) -> None:
    trial = case.trial(WORKERS)
    shape = (WORKERS, size_of(trial.shapes))
    state = trial.first(trial.normal())
    magnitudes = st.floats(2.0**-60, 2.0**60, width=32)
    numbers = st.just(0.0) | magnitudes | magnitudes.map(lambda x: -x)

    @hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @hypothesis.given(hypothesis.extra.numpy.arrays(np.float32, shape, elements=numbers))
    def holds(given: np.ndarray) -> None:
        results, _ = trial.step(tree_of(trial.shapes, given), state)
        close_to_the_mean(case, given.astype(np.float64), rows_of(results))

    holds()
