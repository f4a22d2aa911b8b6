"""Variance-based: what agrees from step to step is sent, noise waits, and nothing is lost."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.compression.sparsifiers import variance_based
from tests.codecs import run, send
from tests.slow import slow


def rounded(magnitudes: np.ndarray, largest: float) -> np.ndarray:
    """The nearest power of two, at most that below the largest; 0 from 8 binary orders below."""
    top = np.floor(np.log2(largest))
    low = 2.0 ** np.floor(np.log2(magnitudes))
    nearest = np.where(magnitudes < 1.5 * low, low, 2 * low)
    nearest = np.minimum(nearest, 2.0**top)
    return np.where(nearest >= 2.0 ** (top - 7), nearest, 0)


def oracle(given: np.ndarray, alpha: float, decay: float, k: int) -> tuple[np.ndarray, int]:
    """What is sent in each step, by the formulas, and what exceeded the capacity in the last."""
    r = v = np.zeros(given.shape[1])
    sent = []
    for x in given:
        r, v = r + x, v + x**2
        telling = r**2 > alpha * v
        value = np.zeros_like(r)
        if telling.any():
            value[telling] = rounded(np.abs(r[telling]), np.abs(r[telling]).max())
        order = np.argsort(-np.where(value > 0, np.abs(r), -1))[:k]
        c = np.zeros_like(r)
        c[order] = np.sign(r[order]) * value[order]
        lost = max(np.count_nonzero(value) - k, 0)
        r, v = r - c, np.where(c != 0, 0, decay * v)
        sent.append(c)
    return np.array(sent), lost


@pytest.mark.parametrize("alpha, k", [slow(1.0, 30), (1.5, 4), slow(0.5, 8)])
def test_against_numpy(alpha: float, k: int) -> None:
    rng = np.random.default_rng(3)
    given = (rng.normal(size=(12, 30)) + 0.5) * 10.0 ** rng.uniform(-2, 0, 30)
    given = given.astype(np.float32)
    codec = variance_based(alpha=alpha, decay=0.9, k=k)
    sent, _, memory = run(codec, given)
    expected, lost = oracle(given.astype(np.float64), alpha, 0.9, k)
    np.testing.assert_array_equal(sent, expected)
    assert np.count_nonzero(sent) > 12 and memory.report.overflow == lost


@pytest.mark.parametrize("scale", [3e37, slow(1e-37)])
def test_any_magnitude(scale: float) -> None:
    # Squares of these would not fit in float32.
    x = (np.array([1.0, -1.0, 0.6, 0.0]) * scale).astype(np.float32)
    sent, _, _ = run(variance_based(ratio=1.0), np.stack([x, x]))
    assert not sent[0].any()
    largest = 2.0 * np.float64(x[0])
    expected = [*rounded(largest * np.array([1.0, 1.0, 0.6]), largest), 0]
    np.testing.assert_array_equal(sent[1], np.array(expected) * [1, -1, 1, 1])


def test_small_coordinates_wait() -> None:
    # 1 / 100 is nearly seven binary orders below 1, 1 / 1000 nearly ten.
    x = jnp.array([1.0, 0.01, 0.001])
    codec = variance_based(alpha=0.5, ratio=1.0)
    sent, memory = send(codec, codec.init(x), x)
    np.testing.assert_array_equal(sent, [1.0, 2.0**-7, 0.0])
    np.testing.assert_allclose(memory.own.kept, [0, 0.01 - 2.0**-7, 0.001], rtol=1e-5)
    assert memory.report.overflow == 0
