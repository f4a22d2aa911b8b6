"""NoLoCo against NumPy: local steps, pairs, momentum; and random pairs."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import gossip
from tests.gossip.workers import flags_of, matrices_of, start, steps, trajectory
from tests.slow import slow

PERIOD, COUNT = 3, 13
NUMBERS = {"momentum": 0.4, "learning_rate": 0.7, "pull": 0.9}


def by_hand(x: np.ndarray, updates: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    """The published equations, in float64: both messages, and no all-reduce."""
    anchor, momentum = x.astype(np.float64), np.zeros(x.shape)
    x, found = anchor.copy(), []
    for t, (update, weights) in enumerate(zip(updates, matrices, strict=True)):
        x = x + update
        if (t + 1) % PERIOD == 0:
            moved = x - anchor
            pulled = anchor - weights @ anchor
            momentum = (
                NUMBERS["momentum"] * momentum
                + NUMBERS["learning_rate"] * weights @ moved
                - NUMBERS["pull"] * pulled
            )
            anchor = anchor + momentum
            x = anchor.copy()
        found.append(x.copy())
    return np.stack(found)


@pytest.mark.parametrize("workers", [4, slow(1), slow(5), slow(8)])
def test_against_numpy(workers: int) -> None:
    x, updates = start(workers), steps(COUNT, workers)
    mixing = gossip.random_pairs(workers)
    found, _ = trajectory(gossip.noloco(mixing, PERIOD, **NUMBERS), x, updates)
    expected = by_hand(x, updates, matrices_of(mixing, COUNT))
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("workers", [1, 2, 5, 8])
def test_all_pairs_exchange_equally_often(workers: int) -> None:
    mixing = gossip.random_pairs(workers)
    pairs = [tuple(map(int, pair)) for m in mixing.matrices for pair in np.argwhere(np.triu(m, 1))]
    assert sorted(pairs) == [*itertools.combinations(range(workers), 2)]
    assert all((np.count_nonzero(m, axis=0) <= 2).all() for m in mixing.matrices)
    if workers == 8:
        drawn = flags_of(mixing, 2000).mean(axis=0)
        assert np.abs(drawn - 1 / 7).max() < 4 * np.sqrt(1 / 7 * 6 / 7 / 2000)


def test_narrow_parameters_are_sent_in_float32() -> None:
    """The sum of a displacement and parameters does not fit in 16 bits."""
    tx = gossip.noloco(gossip.random_pairs(2), 1)
    params: Any = jaxcomm.replicate(jnp.zeros(12, jnp.bfloat16), 2)
    step = jaxcomm.simulate(lambda w, b: jnp.sum(w.astype(jnp.float32)) * jnp.mean(b), tx, 2)
    state = jaxcomm.init(tx, params, 2)
    sent = jaxcomm.wire.account(step, params, state, jax.ShapeDtypeStruct((2,), jnp.float32))
    assert [c.bytes_per_worker for c in sent.collectives if c.kind == "ppermute"] == [48]
