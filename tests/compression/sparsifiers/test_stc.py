"""Ternary: one magnitude, the mean of the largest, whatever the shape and the magnitudes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Codec, Context
from jaxcomm.compression.sparsifiers import stc


def sent(codec: Codec, x: np.ndarray, count: int = 1) -> np.ndarray:
    @jax.jit
    def once(x: jax.Array) -> jax.Array:
        payload, _ = codec.encode(Context.of(x), x)
        return codec.decode(Context.of(x).received(count), payload)

    return np.asarray(once(jnp.asarray(x, jnp.float32)), np.float64)


def test_the_largest_become_their_mean_magnitude() -> None:
    x = np.random.default_rng(0).normal(size=(9, 11))
    result = sent(stc(k=13), x)
    places = np.argsort(-np.abs(x).ravel())[:13]
    expected = np.zeros(99)
    expected[places] = np.sign(x.ravel()[places]) * np.abs(x.ravel()[places]).mean()
    np.testing.assert_allclose(result.ravel(), expected, rtol=1e-6)
    np.testing.assert_allclose(sent(stc(k=13), x, count=4), result / 4, rtol=1e-6)
    # What is sent is orthogonal to what is left out.
    assert abs(np.sum((x - result) * result)) < 1e-5


@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1e20, 3e37])
def test_means_neither_vanish_nor_overflow(scale: float) -> None:
    x = np.array([3.0, -3.0, 3.0, 3.0, 0.0]) * scale
    np.testing.assert_allclose(sent(stc(k=4), x), x, rtol=1e-6)


def test_the_largest_float_stays_finite() -> None:
    x = np.full(1000, np.finfo(np.float32).max)
    np.testing.assert_array_equal(sent(stc(ratio=1.0), x), x)


@pytest.mark.parametrize("shape", [(0,), (), (1,), (2, 0)])
def test_edges_of_shape(shape: tuple[int, ...]) -> None:
    np.testing.assert_array_equal(sent(stc(ratio=0.01), np.full(shape, -2.0)), np.full(shape, -2.0))


def test_the_bound_is_attained() -> None:
    codec = stc(k=4)
    for x, delta in ((np.eye(100)[3], 1 / 4), (np.ones(100), 4 / 100)):
        left = np.sum((x - sent(codec, x)) ** 2) / np.sum(x**2)
        np.testing.assert_allclose(1 - left, delta, rtol=1e-5)
        assert codec.claims.contraction(100, 1) <= delta * (1 + 1e-9)
    assert stc(k=10).claims.contraction(100, 1) == 1 / 10


def test_one_option_of_two() -> None:
    with pytest.raises(ValueError, match="exactly one of `ratio` and `k`"):
        stc()
