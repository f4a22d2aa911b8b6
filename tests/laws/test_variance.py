"""The variance stays within the stated bound: E|G - mean|^2 <= theta / n * sum |x_i|^2."""

import numpy as np
import pytest

from jaxcomm.testing._law import require_moment
from tests.cases import CASES, Case, rows_by_workers
from tests.workers import draws, flat, gradients

DRAWS = 4000  # As many as in the law of no bias, to share its program.
BOUNDED = [c for c in CASES if c.variance]


def check_variance(case: Case, workers: int) -> None:
    updates = gradients(workers, seed=3)
    given = flat(updates)
    errors = np.sum((draws(case.make(), updates, DRAWS) - given.mean(axis=0)) ** 2, axis=1)
    bound = case.variance(given.shape[1], workers) / workers * np.sum(given**2)
    rounding = np.sum((2.0**-21 * given) ** 2)
    require_moment("variance", errors, bound + rounding, f"{case} on {workers}", alpha=1e-6)


# Their draws take seconds, and a row with the same variance is quick: a code is lossless, and both
# kinds of directions of `zeroth_order` have one bound.
LONG_DRAWS = {"elias", "golomb_rice", "rans", "zeroth_order_gaussian"}
RANDOM = [c for c in BOUNDED if c.random]
LONG = [c for c in RANDOM if c.name in LONG_DRAWS]
SHORT = [c for c in RANDOM if c.name not in LONG_DRAWS]
EXACT = [c for c in BOUNDED if not c.random]  # Deterministic methods have separate, quick tests.


@pytest.mark.parametrize(("case", "workers"), rows_by_workers(SHORT, [3], [3], (1, 8)), ids=repr)
def test_variance(case: Case, workers: int) -> None:
    check_variance(case, workers)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "workers"), rows_by_workers(LONG, [1, 3, 8], [3]), ids=repr)
def test_variance_of_long_draws(case: Case, workers: int) -> None:
    check_variance(case, workers)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3, 8])
@pytest.mark.parametrize("case", EXACT, ids=repr)
def test_none_where_nothing_is_drawn(case: Case, workers: int) -> None:
    check_variance(case, workers)
