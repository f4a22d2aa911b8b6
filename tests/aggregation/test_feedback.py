"""What feedback keeps is what means lack: nothing is lost over a run, at either end."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k
from tests.aggregation.runs import steps
from tests.slow import slow
from tests.workers import Mode

STEPS = 7
IN_TWO_MODES = pytest.mark.parametrize("mode", ["checked", slow("vmap")])


def draw(workers: int, size: int, seed: int = 0) -> np.ndarray:
    given = np.random.default_rng(seed).standard_t(3, size=(STEPS, workers, size))
    return given.astype(np.float32).astype(np.float64)


def run(
    tx: Any, given: np.ndarray, mode: Mode, weights: np.ndarray | None = None
) -> tuple[np.ndarray, Any]:
    """The sum of all results, and what is remembered at the end."""
    results, states = zip(*steps(tx, given, mode, weights), strict=True)
    total = np.sum([np.asarray(x[0], np.float64) for x in results], axis=0)
    return total, states[-1].own.per_worker["data"][0]


@IN_TWO_MODES
@pytest.mark.parametrize(
    "tx",
    [
        jaxcomm.all_gather_mean(error_feedback(top_k(ratio=0.1))),
        slow(jaxcomm.all_reduce_mean(error_feedback(dither(levels=15)))),
    ],
    ids=["gathered", "summed"],
)
def test_weighted(tx: Any, mode: Mode) -> None:
    given, weights = draw(4, 30), np.random.default_rng(1).integers(0, 5, size=(STEPS, 4))
    weights[:, 0] += 1
    total, memory = run(tx, given, mode, weights)
    share = weights / weights.sum(axis=1, keepdims=True)
    lacking = np.einsum("ti,tid->d", share, given) - total
    np.testing.assert_allclose(lacking, np.mean(memory.kept, axis=0), rtol=0, atol=2e-5)
    assert np.abs(lacking).max() > 1e-3


@pytest.mark.slow
@IN_TWO_MODES
@pytest.mark.parametrize(("workers", "size"), [(3, 20), slow(8, 30), slow(8, 5)])
def test_both_ends_of_two_stages(workers: int, size: int, mode: Mode) -> None:
    given = draw(workers, size)
    tx = jaxcomm.two_stage_mean(error_feedback(top_k(ratio=0.3)))
    total, memory = run(tx, given, mode)
    columns = -(-size // workers)
    senders, owners = np.asarray(memory.sent.kept), np.asarray(memory.mean.kept)
    assert senders.shape == (workers, workers, columns) and owners.shape == (workers, columns)
    kept = (senders.mean(axis=0, dtype=np.float64) + owners).ravel()
    lacking = given.mean(axis=1).sum(axis=0) - total
    np.testing.assert_allclose(kept[:size], lacking, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(kept[size:], 0)
    # A row of one coordinate is sent whole; elsewhere both ends hold something back.
    assert columns == 1 or min(np.abs(senders).max(), np.abs(owners).max()) > 0.1


def test_overflow_during_the_exchange_is_not_kept() -> None:
    tx = jaxcomm.all_gather_mean(error_feedback(top_k(k=1)))
    found = [*steps(tx, [jnp.full((2, 3), size) for size in (2e38, 2e38, 1.0)])]
    assert [bool(np.isfinite(x).all()) for x, _ in found] == [True, False, True]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found[-1][1].own))
