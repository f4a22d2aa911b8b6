"""Dion against its algorithm in NumPy, with the mean gradient on one worker."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from tests.low_rank import dion
from tests.slow import slow
from tests.steps import steps

WORKERS, STEPS, MOMENTUM = 3, 6, 0.8
SHAPES = {"wide": (6, 9), "kernel": (2, 3, 5, 4), "vector": (10,), "small": (2, 2)}


@pytest.mark.parametrize(
    ("rank", "feedback"), [(2, True), slow(2, False), slow(1, True), slow(4, True)]
)
def test_updates_are_those_of_one_worker_with_the_mean_gradient(rank: int, feedback: bool) -> None:
    rng = np.random.default_rng(0)
    given = {
        name: rng.normal(size=(STEPS, WORKERS, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    tx = jaxcomm.dion(rank=rank, momentum=MOMENTUM, feedback=feedback)
    results, _ = steps(tx, given)
    means = {name: each.mean(axis=1, dtype=np.float64) for name, each in given.items()}
    for name in ("vector", "small"):
        np.testing.assert_allclose(results[name][:, 0], means[name], rtol=1e-5, atol=1e-6)
    for name in ("wide", "kernel"):
        gradients = means[name].reshape(STEPS, -1, SHAPES[name][-1])
        if rank * sum(gradients.shape[1:]) >= gradients[0].size:
            continue  # Its factors are no smaller.
        expected = dion(gradients, rank, MOMENTUM, feedback).reshape(STEPS, *SHAPES[name])
        np.testing.assert_allclose(results[name][:, 0], expected, rtol=0, atol=5e-5)


def test_the_workers_send_two_factors() -> None:
    """Table 1 of the paper's first version: `(rows + columns) rank` numbers for each matrix."""
    tx = optax.chain(jaxcomm.dion(rank=2), optax.sgd(0.1))
    params = {"w": jnp.zeros((16, 12)), "b": jnp.zeros(12)}
    state = jaxcomm.init(tx, params, 4)
    loss = lambda p, x: jnp.mean((x @ p["w"] + p["b"][None]) ** 2)  # noqa: E731
    step = jaxcomm.simulate(loss, tx, 4)
    sent = jaxcomm.wire.account(step, params, state, jnp.ones((8, 16)))
    numbers = 2 * (16 + 12) + 12 + 1  # Both factors, the vector and the flag.
    of_update = [c for c in sent.collectives if "metrics" not in c.where]
    assert sum(c.bytes_per_worker for c in of_update) == 2 * 3 / 4 * 4 * numbers


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_update_does_not_depend_on_the_scale(scale: float) -> None:
    x = np.random.default_rng(1).normal(size=(STEPS, WORKERS, 6, 9)).astype(np.float32)
    tx: Any = jaxcomm.dion(rank=2)
    expected, found = steps(tx, x)[0], steps(tx, x * np.float32(scale))[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_a_bucket_is_no_matrix() -> None:
    with pytest.raises(ValueError, match="`scope` must be 'leaf'"):
        jaxcomm.dion(rank=1, scope="bucket")
