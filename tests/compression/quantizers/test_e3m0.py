"""Floats of 4 bits: which numbers are exact, and that all others are unbiased."""

import numpy as np

from jaxcomm.compression.quantizers import e3m0
from tests.codecs import draws


def test_seven_powers_and_zero_are_exact() -> None:
    powers = 5.5 * 2.0 ** -np.arange(7)
    x = np.concatenate([powers, -powers, [0.0]])
    np.testing.assert_array_equal(draws(e3m0(), x, 3), np.tile(x, (3, 1)))


def test_one_of_two_neighbors_without_bias() -> None:
    levels = 3 * np.concatenate([[0.0], 2.0 ** np.arange(-6.0, 1)])
    below, above, count = levels[:-1], levels[1:], 10_000
    x = np.random.default_rng(0).uniform(below, above)
    found = draws(e3m0(), np.append(x, 3.0), count)[:, :-1]
    assert ((found == below) | (found == above)).all()
    spread = np.sqrt((above - x) * (x - below) / count)
    np.testing.assert_array_less(np.abs(found.mean(axis=0) - x), 4.5 * spread)
