"""Sketched SGD against its definition in NumPy: true top-k of the sum, momentum, nothing lost."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from tests.steps import steps
from tests.workers import aggregate

WORKERS, SIZE, K, STEPS = 4, 60, 5, 4


def numpy_updates(given: np.ndarray, momentum: float, masking: bool) -> list[np.ndarray]:
    """The mean of true top-k, as if sketches were exact, of the same updates at each step."""
    velocity, residual, updates = np.zeros_like(given), np.zeros_like(given), []
    for _ in range(STEPS):
        velocity = momentum * velocity + given
        residual = residual + velocity
        mean = residual.mean(axis=0)
        chosen = np.argsort(-np.abs(mean))[:K]
        update = np.zeros(SIZE)
        update[chosen] = mean[chosen]
        residual[:, chosen] = 0
        if masking:
            velocity[:, chosen] = 0
        updates.append(update)
    return updates


@pytest.mark.slow
@pytest.mark.parametrize("masking", [True, False])
def test_with_all_candidates_it_is_exact_top_k(masking: bool) -> None:
    momentum, given = 0.9, np.random.default_rng(0).normal(size=(WORKERS, SIZE))
    tx = jaxcomm.sketched_sgd(
        sketch_ratio=0.5,
        k=K,
        candidates=SIZE / K,
        momentum=momentum,
        momentum_masking=masking,
        hashing="elements",
    )
    results, _ = steps(tx, np.stack([given] * STEPS).astype(np.float32))
    expected = np.stack(numpy_updates(given, momentum, masking))[:, None].repeat(WORKERS, 1)
    np.testing.assert_allclose(results, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_sums_of_small_values_are_found() -> None:
    """Each worker's largest are its own; what all share is below them everywhere."""
    size, shared = 1000, np.arange(5) * 190
    given = np.random.default_rng(1).normal(size=(8, size)) * 0.01
    given[:, shared] += 0.9
    for worker in range(8):
        given[worker, 10 + 7 * np.arange(20) + worker] += 1.0 * (-1) ** np.arange(20)
    updates = jnp.asarray(given, jnp.float32)
    sketched = jaxcomm.sketched_sgd(sketch_ratio=0.5, rows=5, k=5, momentum=0.0, hashing="elements")
    found = aggregate(sketched, updates)[0]
    assert set(np.flatnonzero(found)) == set(shared)
    np.testing.assert_allclose(found[shared], given[:, shared].mean(axis=0), rtol=1e-5)
    of_pairs = aggregate(jaxcomm.gtop_k(k=5), updates)[0]
    assert set(np.flatnonzero(of_pairs)) != set(shared)


@pytest.mark.slow
def test_a_kernel_for_tiles_finds_the_same() -> None:
    size = 20_000
    given = np.random.default_rng(3).normal(size=(2, size)) * 1e-3
    large = np.random.default_rng(4).choice(size, 8, replace=False)
    given[:, large] += 1.0
    tx = jaxcomm.sketched_sgd(sketch_ratio=0.5, rows=3, k=8, momentum=0.0)
    found = aggregate(tx, jnp.asarray(given, jnp.float32))[0]
    assert set(np.flatnonzero(found)) == set(large)
