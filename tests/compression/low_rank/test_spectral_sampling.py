"""ATOMO: probabilities by the paper's algorithm, and components drawn as often."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm.compression import _systematic
from jaxcomm.compression.low_rank import _spectral_sampling, spectral_sampling
from jaxcomm.compression.sparsifiers import _random_k
from tests.laws.test_contraction import compressed
from tests.low_rank import atomo_probabilities
from tests.workers import aggregator, initial

KINDS = {
    "normal": lambda rng, size: np.abs(rng.normal(size=size)),
    "heavy-tailed": lambda rng, size: np.abs(rng.standard_t(1.2, size=size)),
    "equal": lambda rng, size: np.ones(size),
    "geometric": lambda rng, size: 0.5 ** np.arange(size),
    "one": lambda rng, size: np.eye(size)[0],
    "zero": lambda rng, size: np.zeros(size),
}


@pytest.mark.quick(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rank", "size"), [(1, 2), (1, 40), (4, 9), (10, 200)])
def test_probabilities_are_those_of_the_paper(rank: int, size: int, kind: str) -> None:
    values = np.sort(KINDS[kind](np.random.default_rng(size), size).astype(np.float32))[::-1].copy()
    codes = np.asarray(_spectral_sampling._codes(jnp.asarray(values), rank), np.float64)
    one = 2.0 ** _systematic.digits(rank)
    expected = atomo_probabilities(values.astype(np.float64), rank)
    np.testing.assert_allclose(codes / one, expected, rtol=1e-5, atol=2 * size / one)
    assert codes.sum() <= rank * one and np.all(codes[values > 1e-37] > 0)


@pytest.mark.quick(1)
@pytest.mark.parametrize("k", [1, 5, 20])
def test_of_entries_they_are_those_of_wangni(k: int) -> None:
    x = np.random.default_rng(k).normal(size=64).astype(np.float32)
    order = np.argsort(-np.abs(x))
    codes = np.asarray(_random_k._codes(jnp.asarray(x), k), np.float64)[order]
    expected = atomo_probabilities(np.abs(x[order]).astype(np.float64), k)
    np.testing.assert_allclose(codes / 2.0 ** _systematic.digits(k), expected, rtol=1e-5, atol=1e-6)


def matrix(rows: int = 24, columns: int = 16) -> np.ndarray:
    rng = np.random.default_rng(rows)
    decaying = rng.normal(size=(rows, columns)) * 0.8 ** np.arange(columns)
    return decaying.astype(np.float32)


def moment(x: np.ndarray, rank: int) -> float:
    values = np.linalg.svd(x.astype(np.float64), compute_uv=False)
    return float(np.sum(values**2 / atomo_probabilities(values, rank)) - np.sum(values**2))


@pytest.mark.quick(1)
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_the_mean_and_the_variance_are_exact(rank: int) -> None:
    draws, x = 6000, matrix()
    sample = compressed(spectral_sampling(rank), jnp.asarray(x), draws)
    deviation = sample.std(axis=0) / draws**0.5
    assert np.all(np.abs(sample.mean(axis=0) - x) <= 6 * deviation + 1e-5)
    along = np.tensordot(sample, x, 2) / np.sum(x**2)
    assert abs(along.mean() - 1) <= 6 * along.std() / draws**0.5 + 1e-5
    errors = np.sum((sample - x) ** 2, axis=(1, 2))
    assert abs(errors.mean() - moment(x, rank)) <= 6 * errors.std() / draws**0.5
    assert moment(x, rank) <= spectral_sampling(rank).claims.variance(x.size, 1) * np.sum(x**2)
    assert np.linalg.matrix_rank(sample[0], tol=1e-4) <= rank


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", [(12, 7), (3, 4, 7), (2, 3, 2, 7)], ids=str)
def test_leaves_of_more_axes_are_matrices(shape: tuple[int, ...]) -> None:
    x = jnp.asarray(matrix(12, 7))
    flat = compressed(spectral_sampling(2), x, 3)
    folded = compressed(spectral_sampling(2), x.reshape(shape), 3)
    np.testing.assert_allclose(folded.reshape(3, 12, 7), flat, atol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_matrix_of_that_rank_is_exact(rank: int) -> None:
    rng = np.random.default_rng(rank)
    x = (rng.normal(size=(20, rank)) @ rng.normal(size=(rank, 15))).astype(np.float32)
    decoded = compressed(spectral_sampling(rank), jnp.asarray(x), 20)
    np.testing.assert_allclose(decoded, np.broadcast_to(x, decoded.shape), atol=2e-4)


@pytest.mark.slow
def test_a_tree_takes_one_message_and_the_bytes_that_are_claimed() -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "a": (12, 7), "b": (12, 7), "convolution": (3, 3, 2, 8), "bias": (7,), "scale": (),
        "empty": (0, 4),
    }  # fmt: skip
    rng = np.random.default_rng(1)
    given = {name: jnp.asarray(rng.normal(size=(3, *s)), jnp.float32) for name, s in shapes.items()}
    tx = jaxcomm.atomo(rank=2)

    numbers = 2 * 2 * (12 + 7) + 2 * (18 + 8) + 7 + 1
    run, state, ones = aggregator(tx, 3, "checked"), initial(tx, given, "checked"), jnp.ones(3)
    sent = jaxcomm.wire.account(run, given, state, ones)
    assert sent.bytes_per_worker == 2 * (4 * numbers + 4)
    assert len([each for each in sent.collectives if 0 not in each.shape]) == 1
    results, _ = run(given, state, ones)
    for name in ("bias", "scale", "empty"):
        expected = np.asarray(given[name]).mean(axis=0, keepdims=True).repeat(3, 0)
        np.testing.assert_allclose(results[name], expected, atol=1e-6)
    assert results["empty"].shape == (3, 0, 4)


@pytest.mark.parametrize("scale", [1e-34, 1e36])
def test_any_magnitude(scale: float) -> None:
    x = matrix() / np.abs(matrix()).max()
    decoded = compressed(spectral_sampling(3), jnp.asarray(x * np.float32(scale)), 400)
    assert np.all(np.isfinite(decoded))
    deviation = decoded.std(axis=0) / 20
    assert np.all(np.abs(decoded.mean(axis=0) - x * scale) <= 6 * deviation + 1e-5 * scale)


def test_options_out_of_range_are_errors() -> None:
    with pytest.raises(ValueError, match="`rank` must be a Python int of at least 1, got 0"):
        jaxcomm.atomo(rank=0)
    with pytest.raises(ValueError, match="`scope` must be 'leaf', got 'tree'"):
        jaxcomm.atomo(rank=1, scope="tree")
