"""Workers draw apart, steps draw apart, and the seed decides."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import MEANS, Case, rows
from tests.workers import aggregate, draws

RANDOM = [c for c in MEANS if c.random and not c.fitted]


def _halfway(case: Case, workers: int, coordinates: int) -> np.ndarray:
    """Updates that lie between two levels, with a first coordinate that sets the norm."""
    between = 0.7 * min(case.resolution(workers, 1), 1)
    return np.concatenate(
        [np.ones((workers, 1)), np.full((workers, coordinates - 1), between)], axis=1
    ).astype(np.float32)


def check_workers_draw_apart(case: Case) -> None:
    # Four workers round one number, each up or down: by coins of their own, the sum takes more than
    # the two values that a common coin leaves.
    (result,) = draws(case.make(), jnp.asarray(_halfway(case, 4, 2000)), 1)
    assert len(np.unique(result[1:])) > 2


@pytest.mark.parametrize(
    "case", rows([c for c in RANDOM if not (c.rerounds or c.common_coins)]), ids=repr
)
def test_workers_draw_apart(case: Case) -> None:
    check_workers_draw_apart(case)


@pytest.mark.parametrize("case", rows(RANDOM), ids=repr)
def test_steps_draw_apart(case: Case) -> None:
    first, second = draws(case.make(), jnp.asarray(_halfway(case, 2, 200)), 2)
    assert np.any(first != second)


@pytest.mark.parametrize("case", rows(RANDOM), ids=repr)
def test_the_seed_decides(case: Case) -> None:
    given = jnp.asarray(_halfway(case, 2, 200))
    first, again, other = (aggregate(case.make(seed=seed), given) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)
