"""Levels follow the data: less variance than of equal ones, and no bias whatever they are."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Context, Keys
from jaxcomm.compression.quantizers import adaptive_levels
from jaxcomm.compression.quantizers._adaptive_levels import Levels, fit_levels
from tests.codecs import context_of, draws, payload_of
from tests.slow import slow


def exact_variance(levels: np.ndarray, x: np.ndarray) -> float:
    ladder = np.concatenate([[0.0], levels])
    below = np.clip(np.searchsorted(ladder, np.abs(x), side="right") - 1, 0, len(levels) - 1)
    return np.sum((ladder[below + 1] - np.abs(x)) * (np.abs(x) - ladder[below]))


def own_levels(x: np.ndarray, levels: int) -> np.ndarray:
    """Of each of [vectors, d]."""
    codec = adaptive_levels(levels=levels)
    measured = jax.jit(jax.vmap(lambda x: context_of(codec, x).statistics))
    return np.asarray(measured(jnp.asarray(x, jnp.float32)).levels, np.float64)


@pytest.mark.slow
def test_less_variance_than_equal_levels() -> None:
    rng = np.random.default_rng(0)
    heavy = [
        rng.standard_t(2, size=30_000),
        rng.standard_t(3, size=30_000),
        np.exp(2 * rng.normal(size=30_000)),
        rng.normal(size=30_000) * (rng.random(30_000) < 0.05),
    ]
    for x, fitted, gain in zip(heavy, own_levels(heavy, 7), (5, 4, 4, 1.1), strict=True):
        assert np.all(np.diff(fitted) > 0) and fitted[0] > 0
        np.testing.assert_allclose(fitted[-1], np.abs(x).max(), rtol=1e-6)
        equal = np.abs(x).max() * np.arange(1, 8) / 7
        assert gain * exact_variance(fitted, x) < exact_variance(equal, x)


@pytest.mark.slow
def test_each_level_is_locally_optimal() -> None:
    sample = np.append(np.random.default_rng(5).uniform(size=25) ** 3, 1.0).astype(np.float32)
    fitted = np.asarray(fit_levels(jnp.asarray(sample), jnp.ones(26), 4), np.float64)
    for j, place in itertools.product(range(3), sample):
        moved = np.sort([*np.delete(fitted, j), place])
        if np.searchsorted(np.delete(fitted, j), place) == j:  # Between its neighbors.
            assert exact_variance(fitted, sample) <= exact_variance(moved, sample) * (1 + 1e-6)


@pytest.mark.slow
def test_a_weight_equals_a_repetition() -> None:
    sample = jnp.asarray(np.random.default_rng(6).uniform(size=40) ** 2, jnp.float32)
    weights = jnp.asarray(np.arange(40) % 3 + 1, jnp.float32)
    repeated = jnp.repeat(sample, np.arange(40) % 3 + 1)
    np.testing.assert_allclose(
        fit_levels(sample, weights, 4), fit_levels(repeated, jnp.ones(repeated.size), 4), rtol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("levels", [3, slow(1), slow(6)])
def test_the_error_is_exactly_that_of_the_levels(levels: int) -> None:
    x = np.random.default_rng(levels).standard_t(3, size=60).astype(np.float32).astype(np.float64)
    sample = draws(adaptive_levels(levels=levels), x, 4000)
    deviation = sample.std(axis=0) / 4000**0.5
    assert np.all(np.abs(sample.mean(axis=0) - x) <= 6 * deviation + 1e-3)
    errors = np.sum((sample - x) ** 2, axis=1)
    exact = exact_variance(own_levels(x[None], levels)[0], x)
    assert abs(errors.mean() - exact) <= 6 * errors.std() / 4000**0.5 + 1e-5
    assert exact <= adaptive_levels(levels=levels).claims.variance(60, 1) * np.sum(x**2)


def test_levels_of_other_workers_cause_no_bias() -> None:
    codec, x = adaptive_levels(levels=3), jnp.asarray([0.02, -0.3, 0.8, 1.0, 0.0, -1.7])
    levels = Levels(jnp.asarray([0.5, 0.5, 2.0]))  # Two of them in one place, as agreed ones may.

    def once(key: jax.Array) -> jax.Array:
        context = Context(Keys(key, key), statistics=levels, shape=x.shape)
        payload, _ = codec.encode(context, x)
        return codec.decode(context.received(), payload)

    sample = np.asarray(jax.jit(jax.vmap(once))(jax.random.split(jax.random.key(1), 8000)))
    assert set(np.unique(np.abs(sample))) == {0.0, 0.5, 2.0}
    assert np.all(np.abs(sample.mean(axis=0) - x) <= 6 * sample.std(axis=0) / 8000**0.5 + 1e-6)


def test_codes_take_as_few_bits_as_hold_them() -> None:
    for levels, bits in ((1, 2), (3, 3), (4, 4), (7, 4), (127, 8)):
        payload = payload_of(adaptive_levels(levels=levels), (320,))
        assert payload.codes.shape == (10 * bits,)
