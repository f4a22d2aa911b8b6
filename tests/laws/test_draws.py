"""Workers and steps draw independently, and the seed decides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import MEANS, Case
from tests.workers import aggregate, aggregator, initial

WORKERS, SIZE = 4, 200
RANDOM = [c for c in MEANS if c.random and not c.fitted]


def halfway(case: Case) -> jax.Array:
    """Updates that lie between two levels, after the extremes and the one that sets the norm."""
    updates = np.full((WORKERS, SIZE), 0.7 * min(case.resolution(WORKERS, 1), 1), np.float32)
    extremes = case.extremes(SIZE)
    updates[:, :extremes], updates[:, extremes] = 2, 1
    return jnp.asarray(updates)


def check_workers_draw_independently(case: Case) -> None:
    # Four workers round one number, each up or down: with private keys, the sum takes more than
    # the two values of a common key.
    result = aggregate(case.make(), halfway(case))
    assert len(np.unique(result[0, case.extremes(SIZE) + 1 :])) > 2


@pytest.mark.parametrize(
    "case", [c for c in RANDOM if not (c.rerounds or c.common_draws)], ids=repr
)
def test_workers_draw_independently(case: Case) -> None:
    check_workers_draw_independently(case)


@pytest.mark.parametrize("case", RANDOM, ids=repr)
def test_steps_draw_independently(case: Case) -> None:
    tx, given = case.make(), halfway(case)
    run, ones = aggregator(tx, WORKERS, "vmap"), np.ones(WORKERS, np.float32)
    first, state = run(given, initial(tx, given, "vmap"), ones)
    second, _ = run(given, state, ones)
    assert np.any(np.asarray(first) != np.asarray(second))


@pytest.mark.parametrize("case", RANDOM, ids=repr)
def test_the_seed_decides(case: Case) -> None:
    given = halfway(case)
    first, again = (aggregate(case.make(), given) for _ in range(2))
    other = aggregate(case.make(seed=1), given)
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)
