"""Fits of exponents, against synthetic data with known ones."""

import math

import numpy as np
import pytest

from experiments.study.exponents import compare
from experiments.training.power_laws import binned, fit_exponent


def test_a_fit_is_exact_without_noise() -> None:
    x = np.array([1.0, 3.0, 10.0])
    assert fit_exponent(x, 7 * x**-0.37) == pytest.approx(-0.37, abs=1e-12)
    assert math.isnan(fit_exponent([4.0, 4.0], [1.0, 2.0]))
    assert fit_exponent(x, np.array([1.0, math.nan, 1.0])) == math.inf


def test_bins_are_equally_long_on_a_logarithmic_axis() -> None:
    x = np.arange(1.0, 1025.0)
    across, up = binned(x, 5 / x, 5)
    # Borders are at 4, 16, 64 and 256: the first bin has 1, 2 and 3.
    np.testing.assert_allclose(across[:2], [2.0, np.arange(4, 16).mean()])
    assert len(across) == len(up) == 5
    assert fit_exponent(across, up) == pytest.approx(-1, abs=0.05)


@pytest.mark.parametrize(
    ("exponents", "verdict"),
    [
        ([-1.01, -0.99, -1.0], "agreed"),
        ([-1.3, -0.7, -1.0], "not told apart"),
        ([-0.6, -0.61, -0.59], "refuted"),
        ([-1.4, -1.41, -1.39], "refuted"),
        ([-1.0, math.inf, -1.0], "diverged"),
        ([math.nan] * 3, "-"),
    ],
)
def test_verdicts(exponents: list[float], verdict: str) -> None:
    assert compare(exponents, -1.0, 0.15).verdict == verdict
    assert compare(exponents, math.nan, 0.15).verdict == "-"
