"""The average of many draws is the mean: a z-test at alpha = 1e-6 over all coordinates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.testing._law import require_unbiased
from tests.cases import CASES, Case, rows, rows_by_workers
from tests.workers import draws, flat, gradients

DRAWS = 4000
UNBIASED = [c for c in CASES if c.unbiased]


def check_unbiased(case: Case, workers: int, updates: object = None) -> None:
    updates = gradients(workers, seed=1) if updates is None else updates
    given = flat(updates)
    peak, coordinates = np.abs(given).max(), given.shape[1]
    require_unbiased(
        "unbiased",
        draws(case.make(), updates, DRAWS),
        given.mean(axis=0),
        f"{case} on {workers}",
        spread=case.resolution(*given.shape) * peak,
        rounding=2.0**-21 * peak * (coordinates + 1),
    )


@pytest.mark.parametrize(
    ("case", "workers"), rows_by_workers(UNBIASED, [3], [], (1, 8, 16)), ids=repr
)
def test_unbiased(case: Case, workers: int) -> None:
    check_unbiased(case, workers)


@pytest.mark.parametrize("case", rows(UNBIASED), ids=repr)
def test_unbiased_in_bfloat16(case: Case) -> None:
    updates = gradients(3, seed=2, dtype=jnp.bfloat16)
    check_unbiased(case, 3, jax.tree.map(lambda x: x.astype(jnp.float32), updates))
