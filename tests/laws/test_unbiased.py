"""Of many draws, the average is the mean: a z-test at alpha = 1e-6 over all coordinates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from tests.cases import CASES, Case, rows, rows_by_workers
from tests.workers import draws, flat, gradients

ALPHA = 1e-6
DRAWS = 4000
UNBIASED = [c for c in CASES if c.unbiased]


def check_unbiased(case: Case, workers: int, updates: object = None) -> None:
    updates = gradients(workers, seed=1) if updates is None else updates
    truth = flat(updates).mean(axis=0)
    sample = draws(case.make(), updates, DRAWS)
    # Along the mean itself too: a shrinking bias is small in a coordinate and large in the sum.
    along = sample @ truth
    sample = np.concatenate([sample, along[:, None]], axis=1)
    truth = np.append(truth, truth @ truth)
    deviation = sample.std(axis=0, ddof=1) / DRAWS**0.5
    rounding = 2.0**-21 * np.abs(flat(updates)).max() * len(truth)
    threshold = scipy.stats.norm.isf(ALPHA / 2 / len(truth))
    # Bernstein's second term: values too rare to be seen in so many draws have no deviation yet.
    spread = 2 * case.resolution(*flat(updates).shape) * np.abs(flat(updates)).max()
    unseen = spread * np.log(2 * len(truth) / ALPHA) / (3 * DRAWS)
    unseen = unseen * np.append(np.ones(len(truth) - 1), np.abs(truth[:-1]).sum())
    allowed = threshold * deviation + unseen + rounding
    assert np.all(np.abs(sample.mean(axis=0) - truth) <= allowed)


@pytest.mark.parametrize(
    ("case", "workers"), rows_by_workers(UNBIASED, [3, 16], [], (1, 8)), ids=repr
)
def test_unbiased(case: Case, workers: int) -> None:
    check_unbiased(case, workers)


@pytest.mark.parametrize("case", rows(UNBIASED), ids=repr)
def test_unbiased_in_bfloat16(case: Case) -> None:
    updates = gradients(3, seed=2, dtype=jnp.bfloat16)
    check_unbiased(case, 3, jax.tree.map(lambda x: x.astype(jnp.float32), updates))
