"""SparseLoCo against NumPy, and the bytes of its settings."""

import numpy as np
import optax
import pytest

from jaxcomm.synchronization import sparseloco
from tests.synchronization.towards import account, run

N, SIZE, COUNT, PERIOD, BLOCK, K, DECAY = 3, 10, 15, 3, 4, 2, 0.9
TARGETS = np.random.default_rng(0).normal(size=(N, SIZE)).astype(np.float32)
RATE, OUTER = 0.1, 0.8


def coarse(x: np.ndarray) -> np.ndarray:
    """Of each block the two largest coordinates, as one of two magnitudes."""
    found = np.zeros_like(x)
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        chosen = np.argsort(-np.abs(block), kind="stable")[:K]
        sizes = np.abs(block[chosen])
        is_large = sizes > sizes.mean()
        means = {flag: sizes[is_large == flag].mean() for flag in {*is_large.tolist()}}
        sent = [means[flag] for flag in is_large.tolist()]
        found[start + chosen] = np.sign(block[chosen]) * sent
    return found


def by_hand() -> np.ndarray:
    """The published loop in float64."""
    x, anchor, residual = np.zeros((N, SIZE)), np.zeros(SIZE), np.zeros((N, SIZE))
    found = []
    for t in range(1, COUNT + 1):
        x = x - RATE * (x - TARGETS)
        if t % PERIOD == 0:
            residual = DECAY * residual + (anchor - x)
            sent = np.stack([coarse(each) for each in residual])
            residual = residual - sent
            anchor = anchor - OUTER * sent.mean(axis=0)
            x = np.tile(anchor, (N, 1))
        found.append(x.copy())
    return np.stack(found)


def test_against_numpy() -> None:
    tx = sparseloco(
        optax.sgd(RATE), PERIOD, k=K, block_size=BLOCK, decay=DECAY, learning_rate=OUTER
    )
    np.testing.assert_allclose(run(tx, TARGETS, COUNT)[0], by_hand(), rtol=1e-4, atol=1e-5)


def test_paper_settings_send_a_fifth_of_a_bit() -> None:
    """2 bits and an index of 8 for 64 of 4096 coordinates, and two float32: 0.19 bits each."""
    size = 2**18
    sent = account(sparseloco(optax.sgd(RATE)), np.zeros((2, size), np.float32))
    assert 4 * size / sent.bytes_per_worker == pytest.approx(186, rel=0.01)
