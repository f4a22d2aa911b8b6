"""Ternary: one magnitude, the mean of the largest, whatever the shape and the magnitudes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Context
from jaxcomm.compression.sparsifiers import stc
from tests.codecs import sent
from tests.slow import slow


def test_the_largest_become_their_mean_magnitude() -> None:
    x = np.random.default_rng(0).normal(size=(9, 11)).astype(np.float32)
    result, places = sent(stc(k=13), x), np.argsort(-np.abs(x).ravel())[:13]
    expected = np.zeros(99)
    expected[places] = np.sign(x.ravel()[places]) * np.abs(x.ravel()[places]).mean()
    np.testing.assert_allclose(result.ravel(), expected, rtol=1e-6)
    # What is sent is orthogonal to the residual.
    assert abs(np.sum((x - result) * result)) < 1e-5
    payload, _ = jax.jit(stc(k=13).encode)(Context.of(x), jnp.asarray(x))
    quarter = jax.jit(stc(k=13).decode)(Context.of(x).received(4), payload)
    np.testing.assert_allclose(quarter, result / 4, rtol=1e-6)


@pytest.mark.parametrize("scale", [3e37, slow(1e-37)])
def test_means_neither_vanish_nor_overflow(scale: float) -> None:
    x = np.array([3.0, -3.0, 3.0, 3.0, 0.0]) * scale
    np.testing.assert_allclose(sent(stc(k=4), x), x, rtol=1e-6)


@pytest.mark.parametrize("x", [np.full(1000, 3.4e38), slow(np.zeros((2, 0))), slow(np.array(-2.0))])
def test_equal_coordinates_are_exact(x: np.ndarray) -> None:
    np.testing.assert_array_equal(sent(stc(ratio=1.0), x), x.astype(np.float32))


def test_the_bound_is_attained() -> None:
    codec = stc(k=4)
    for x, delta in ((np.eye(100)[3], 1 / 4), (np.ones(100), 4 / 100)):
        left = np.sum((x - sent(codec, x)) ** 2) / np.sum(x**2)
        np.testing.assert_allclose(1 - left, delta, rtol=1e-5)
        assert codec.claims.contraction(100, 1) <= delta * (1 + 1e-9)
    assert stc(k=10).claims.contraction(100, 1) == 1 / 10
