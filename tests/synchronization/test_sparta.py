"""SPARTA against its equation in NumPy, alone and within DiLoCo."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.synchronization import average_every, local_sgd, sparta
from tests.slow import slow
from tests.synchronization.towards import account, run

N, SIZE, STEPS = 4, 40, 12
TARGETS = np.random.default_rng(0).normal(size=(N, SIZE)).astype(np.float32)
SGD = optax.sgd(0.1)


def averaged(local: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Which coordinates [size] became the mean of those before, [n, size]; others must stay."""
    mean = np.broadcast_to(local.mean(axis=0), local.shape)
    is_mean = (np.abs(after - mean) < 1e-5).all(axis=0)
    is_same = (np.abs(after - local) < 1e-5).all(axis=0)
    assert (is_mean | is_same).all()
    return is_mean


def test_a_share_of_the_coordinates_is_averaged() -> None:
    found, _ = run(optax.chain(SGD, sparta(0.25)), TARGETS, STEPS)
    x, counts = np.zeros((N, SIZE)), np.zeros(SIZE)
    for after in found:
        chosen = averaged(x - 0.1 * (x - TARGETS), after)
        assert chosen.sum() == SIZE // 4
        counts += chosen
        x = after
    assert (counts > 0).sum() > 0.9 * SIZE and counts.max() < STEPS  # New ones in each step.


@pytest.mark.parametrize("period", [1, slow(3)])
def test_all_coordinates_are_local_sgd(period: int) -> None:
    found, _ = run(optax.chain(SGD, sparta(1.0, period)), TARGETS, 6)
    expected, _ = run(optax.chain(SGD, local_sgd(period)), TARGETS, 6)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_only_values_are_sent() -> None:
    """No mask: 10 values, and the number of steps taken and skipped."""
    sent = account(optax.chain(SGD, sparta(0.25)), TARGETS)
    assert sent.bytes_per_worker == 2 * 3 / 4 * 4 * (SIZE // 4 + 2)


def test_it_keeps_workers_of_diloco_together() -> None:
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    apart = {}
    for share in (0.0, 0.25):
        middle = [sparta(share)] if share else []
        found, _ = run(optax.chain(SGD, *middle, average_every(STEPS, outer)), TARGETS, STEPS)
        apart[share] = np.ptp(found[-2], axis=0).mean()
        assert np.ptp(found[-1], axis=0).max() < 1e-6
    assert apart[0.25] < 0.6 * apart[0.0]


def test_a_worker_that_is_not_finite_adds_nothing() -> None:
    tx = optax.chain(SGD, sparta(1.0))
    params = jaxcomm.replicate(jnp.zeros(3), 2)
    step = jaxcomm.simulate(lambda w, x: jnp.sum(w * x[0]), tx, 2)
    batch = jnp.float32([[1.0, 2.0, 3.0], [np.nan, 1.0, 1.0]])
    params, _, _ = step(params, jaxcomm.init(tx, params, 2), batch)
    expected = np.tile(np.float32([-0.1, -0.2, -0.3]), (2, 1))
    np.testing.assert_allclose(jax.tree.leaves(params)[0], expected, rtol=1e-6)
