"""Natural compression: what is exact, what scales, and where the exponents end."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxcomm.compression.quantizers import natural
from tests.codecs import payload_of, sent


def rounded(x: np.ndarray) -> np.ndarray:
    return sent(natural(), x)


def test_powers_of_two_and_zeros_are_exact() -> None:
    powers = 2.0 ** np.arange(-126, 128)
    x = np.concatenate([powers, -powers, [0.0, -0.0]]).reshape(2, -1)
    np.testing.assert_array_equal(rounded(x), x)
    payload = payload_of(natural(), (2, 255))
    assert payload.exponents.dtype == jnp.uint8 and payload.exponents.shape == (510,)
    assert payload.signs.dtype == jnp.uint32 and payload.signs.shape == (16,)


def test_scaling_by_powers_of_two_commutes() -> None:
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    for shift in (-100, -1, 1, 100):
        np.testing.assert_array_equal(rounded(x * 2.0**shift), 2.0**shift * rounded(x))


@pytest.mark.parametrize("x", [1.25, -4 / 3, 1.999, 5.5])
def test_rounding_up_has_the_right_probability(x: float) -> None:
    draws = rounded(np.full(40_000, x))
    below = 2.0 ** np.floor(np.log2(abs(x)))
    assert set(np.unique(np.abs(draws))) <= {below, 2 * below} and np.all(draws * x > 0)
    ups = int(np.sum(np.abs(draws) > below))
    assert scipy.stats.binomtest(ups, draws.size, abs(x) / below - 1).pvalue > 1e-6


def test_the_ends_of_the_exponents() -> None:
    x = np.repeat([float(jnp.finfo(jnp.float32).max), 1.5 * 2.0**127, np.inf, np.nan, 1e-40], 200)
    largest, middle, infinite, nan, tiny = rounded(-x).reshape(5, 200)
    assert {*largest} == {*infinite} == {-np.inf} and np.isinf(nan).all() and not tiny.any()
    assert {*middle} == {-(2.0**127), -np.inf}
