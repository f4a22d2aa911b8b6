"""Eager and delayed DiLoCo against NumPy, and what a step sends."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.synchronization import eager_diloco
from tests.slow import slow
from tests.synchronization.towards import account, run

N, SIZE, COUNT, PERIOD = 4, 6, 17, 4
TARGETS = np.random.default_rng(0).normal(size=(N, SIZE)).astype(np.float32)
RATE, OUTER = 0.1, {"learning_rate": 0.7, "momentum": 0.5}


def make(**options: Any) -> Any:
    return eager_diloco(optax.sgd(RATE), optax.sgd(**OUTER), PERIOD, **options)


def by_hand(eager: bool) -> np.ndarray:
    """The published loop in float64: each worker has an anchor and a momentum of its own."""
    x, anchor, velocity, late = (np.zeros((N, SIZE)) for _ in range(4))
    found = []
    for t in range(1, COUNT + 1):
        x = x - RATE * (x - TARGETS)
        if t % PERIOD == 0:
            fresh = anchor - x
            given = np.tile(late.mean(axis=0), (N, 1))
            if eager:
                others = late.sum(axis=0) - late
                given = (fresh + others) / N
            velocity = OUTER["momentum"] * velocity + given
            anchor = anchor - OUTER["learning_rate"] * velocity
            x, late = anchor.copy(), fresh
        found.append(x.copy())
    return np.stack(found)


@pytest.mark.parametrize("eager", [True, slow(False)])
def test_against_numpy(eager: bool) -> None:
    found, _ = run(make(eager=eager), TARGETS, COUNT)
    np.testing.assert_allclose(found, by_hand(eager), rtol=1e-5, atol=1e-6)
    spread = np.ptp(found[PERIOD - 1 :: PERIOD], axis=1).max(axis=1)
    assert (spread > 0.01).all() if eager else (spread < 1e-6).all()


@pytest.mark.slow
def test_only_the_late_displacement_is_sent_and_feedback_keeps_the_rest() -> None:
    assert account(make(), TARGETS).bytes_per_worker == 2 * 3 / 4 * 4 * (SIZE + 2)
    tx = make(aggregator=jaxcomm.all_gather_mean(error_feedback(top_k(k=2))))
    for each in (make(), tx):
        assert {c.path for c in account(each, TARGETS).collectives} == {("cond 2/2",)}
    found, state = run(tx, TARGETS, COUNT)
    (residual,) = state[1].aggregator.own.per_worker["data"]
    assert np.isfinite(found).all() and np.abs(residual.kept).max() > 0


@pytest.mark.slow
def test_an_absent_worker_continues_alone() -> None:
    found, _ = run(make(), TARGETS, COUNT, present=jnp.arange(N) != 2)
    alone = TARGETS[2] * (1 - (1 - RATE) ** np.arange(1, COUNT + 1))[:, None]
    np.testing.assert_allclose(found[:, 2], alone, rtol=1e-5, atol=1e-6)
