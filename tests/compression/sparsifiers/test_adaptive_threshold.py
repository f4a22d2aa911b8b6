"""The same part of either sign passes, however many coordinates have it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Context
from jaxcomm.compression.sparsifiers import adaptive_threshold


@functools.cache
def program(ratio: float) -> Any:
    codec = adaptive_threshold(ratio=ratio)

    def once(x: jax.Array) -> jax.Array:
        payload, _ = codec.encode(Context.of(x), x)
        return codec.decode(Context.of(x).received(), payload)

    return jax.jit(once)


def sent(ratio: float, x: np.ndarray) -> np.ndarray:
    return np.asarray(program(ratio)(jnp.asarray(x, jnp.float32)), np.float64)


def expected(ratio: float, x: np.ndarray) -> np.ndarray:
    result = np.zeros(x.size)
    for sign in (1, -1):
        places = [j for j in np.argsort(-sign * x) if sign * x[j] > 0]
        places = places[: max(int(ratio * len(places)), 1)]
        result[places] = np.mean(x[places]) if places else 0
    return result


@pytest.mark.quick(1)
@pytest.mark.parametrize("ratio", [0.01, 0.25, 0.999, 1.0])
@pytest.mark.parametrize("positive", [0, 1, 40, 79, 80])
def test_of_each_sign_its_part(ratio: float, positive: int) -> None:
    rng = np.random.default_rng(positive)
    x = np.abs(rng.normal(size=80)) * np.where(np.arange(80) < positive, 1, -1)
    rng.shuffle(x)
    result = sent(ratio, x)
    np.testing.assert_allclose(result, expected(ratio, x), rtol=2e-6, atol=1e-7)
    codec = adaptive_threshold(ratio=ratio)
    left = np.sum((x - result) ** 2) / np.sum(x**2)
    assert 1 - left >= codec.claims.contraction(80, 1) * (1 - 1e-6)


@pytest.mark.slow
def test_zeros_are_not_sent_and_edges_hold() -> None:
    sparse = np.array([0.0, 0.0, 3.0, 0.0, -1.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(sent(0.5, sparse), sparse, rtol=1e-6)
    for x in (np.zeros(5), np.zeros(0), np.float64(-2.0), np.array([1.0, -4.0])):
        np.testing.assert_allclose(sent(0.01, x), x, rtol=1e-6)
    huge = np.array([3e38, 3e38, -1e-37, -1e-37])
    np.testing.assert_allclose(sent(1.0, huge), huge, rtol=1e-6)


@pytest.mark.parametrize("ratio", [0, 1.5, None, "half"])
def test_ratio_is_a_part(ratio: object) -> None:
    with pytest.raises(ValueError, match="`ratio`"):
        adaptive_threshold(ratio=ratio)
