"""ATOMO: probabilities by the paper's algorithm, and components drawn as often."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.compression import _systematic
from jaxcomm.compression.low_rank import _spectral_sampling, spectral_sampling
from tests.codecs import draws
from tests.low_rank import atomo_probabilities
from tests.slow import slow
from tests.workers import aggregate


def singular_values(size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(size)
    return {
        "normal": np.abs(rng.normal(size=size)),
        "heavy-tailed": np.abs(rng.standard_t(1.2, size=size)),
        "equal": np.ones(size),
        "geometric": 0.5 ** np.arange(size),
        "one": np.eye(size)[0],
        "zero": np.zeros(size),
    }


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (4, 9), slow(1, 40), slow(10, 200)])
def test_probabilities_are_those_of_the_paper(rank: int, size: int) -> None:
    one, codes_of = (
        2.0 ** _systematic.digits(rank),
        jax.jit(_spectral_sampling._codes, static_argnums=1),
    )
    for kind, x in singular_values(size).items():
        values = np.sort(x.astype(np.float32))[::-1].copy()
        codes = np.asarray(codes_of(jnp.asarray(values), rank), np.float64)
        expected = atomo_probabilities(values.astype(np.float64), rank)
        near = 2 * size / one
        np.testing.assert_allclose(codes / one, expected, rtol=1e-5, atol=near, err_msg=kind)
        assert codes.sum() <= rank * one and np.all(codes[values > 1e-37] > 0)


def matrix(rows: int = 24, columns: int = 16) -> np.ndarray:
    rng = np.random.default_rng(rows)
    return (rng.normal(size=(rows, columns)) * 0.8 ** np.arange(columns)).astype(np.float32)


@pytest.mark.parametrize("rank", [3, slow(1)])
def test_the_mean_and_the_variance_are_exact(rank: int) -> None:
    count, x = 3000, matrix()
    sample = draws(spectral_sampling(rank), x, count)
    deviation = sample.std(axis=0) / count**0.5
    assert np.all(np.abs(sample.mean(axis=0) - x) <= 6 * deviation + 1e-5)
    values = np.linalg.svd(x.astype(np.float64), compute_uv=False)
    exact = np.sum(values**2 / atomo_probabilities(values, rank)) - np.sum(values**2)
    errors = np.sum((sample - x) ** 2, axis=(1, 2))
    assert abs(errors.mean() - exact) <= 6 * errors.std() / count**0.5
    assert exact <= spectral_sampling(rank).claims.variance(x.size, 1) * np.sum(x**2)
    assert np.linalg.matrix_rank(sample[0], tol=1e-4) <= rank


@pytest.mark.slow
def test_leaves_of_more_axes_are_matrices_and_vectors_are_exact() -> None:
    x = matrix(12, 7)
    folded = draws(spectral_sampling(2), x.reshape(2, 3, 2, 7), 3)
    np.testing.assert_allclose(
        folded.reshape(3, 12, 7), draws(spectral_sampling(2), x, 3), atol=1e-5
    )
    given = {"bias": x[:3], "scale": x[:3, 0], "empty": np.zeros((3, 0, 4), np.float32)}
    results = aggregate(jaxcomm.atomo(rank=2), jax.tree.map(jnp.asarray, given))
    for name, leaf in given.items():
        expected = np.broadcast_to(leaf.mean(axis=0), leaf.shape)
        np.testing.assert_allclose(results[name], expected, atol=1e-6)
