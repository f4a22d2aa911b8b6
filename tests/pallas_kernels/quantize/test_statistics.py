"""What rounding promises: no bias, the variance of two neighbours, noise of the position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantize import dequantize, quantize, reference
from tests.pallas_kernels.quantize import oracle
from tests.slow import slow

DRAWS = 20_000


def many_codes(x: jax.Array, levels: int, bits: int) -> np.ndarray:
    """Decoded arrays for as many seeds, as multiples of the step: float64[draws, size]."""
    seeds = np.random.default_rng(0).integers(0, 2**32, (DRAWS, 2), np.uint32)
    scale = jnp.float32(1)

    def draw(seed: jax.Array) -> jax.Array:
        codes = quantize(x, scale, seed, levels=levels, bits=bits)
        return dequantize(codes, scale, levels=levels, bits=bits, shape=x.shape)

    return np.asarray(jax.jit(jax.vmap(draw))(jnp.asarray(seeds)), np.float64) * levels


@pytest.mark.parametrize(
    ("levels", "bits"), [(7, 4), *(slow(*p) for p in [(1, 2), (127, 8), (1000, 32)])]
)
def test_unbiased_with_the_variance_of_two_neighbours(levels: int, bits: int) -> None:
    # Close to a level, far from it, halfway; of both signs.
    parts = np.array([0.02, 0.2, 0.5, 0.77, -0.02, -0.3, -0.5, -0.9])
    x = ((parts + np.sign(parts) * (levels // 2)) / levels).astype(np.float32)
    samples = many_codes(jnp.asarray(x), levels, bits)
    exact = x.astype(np.float64) * levels
    p = exact - np.floor(exact)
    variance = p * (1 - p)
    assert (np.abs(samples.mean(axis=0) - exact) < 5 * np.sqrt(variance / DRAWS)).all()
    squares = (samples - exact) ** 2
    spread = np.sqrt((p * (1 - p) ** 4 + (1 - p) * p**4 - variance**2) / DRAWS)
    # A number between two levels only ever becomes one of these; 1e-4 is for the float32 decoding.
    assert (np.abs(squares.mean(axis=0) - variance) < 5 * spread + 1e-4 * variance).all()
    covariance = np.cov(samples.T) / np.sqrt(np.outer(variance, variance)) - np.eye(8)
    assert np.abs(covariance - np.diag(np.diag(covariance))).max() < 5 / np.sqrt(DRAWS)


@pytest.mark.parametrize(("levels", "digits"), [(127, 15), slow(7, 19), slow(1, 21)])
def test_the_mean_over_all_noise_is_the_nearest_multiple(levels: int, digits: int) -> None:
    """Exactly, of 2**-digits: of ties, of numbers that are rounded to zero, and of others."""
    unit, scale = 2.0**-digits, np.float32(levels)  # So a number is its own number of levels.
    halves = np.array([0.5, 0.75, 1.5, 2.5, -0.5, -1.5, -2.5, 1001.5, -1002.5]) * unit
    others = np.random.default_rng(0).uniform(-levels, levels, 7)
    x = np.concatenate([halves, others, [levels, -levels, 1e-7]]).astype(np.float32)
    lift, factor = reference.factors(jnp.asarray(scale), levels)
    noise = jnp.arange(2**digits, dtype=jnp.uint32) << (32 - digits)

    def total(x: jax.Array) -> jax.Array:
        codes = reference.round_fixed(jnp.full(noise.shape, x), lift, factor, noise, levels)
        return jnp.sum(codes, dtype=jnp.int32)

    means = np.asarray(jax.lax.map(jax.jit(total), jnp.asarray(x))) * unit
    np.testing.assert_array_equal(means, oracle.expected_codes(x, scale, levels))
    np.testing.assert_array_equal(means[:9] / unit, [0, 1, 2, 2, 0, -2, -2, 1002, -1002])
    # Half a unit, and the rounding of a product to 24 digits.
    exact = x.astype(np.float64)
    assert (np.abs(means - exact) <= unit / 2 + np.abs(exact) * 2.0**-24).all()
    assert means[-1] == 0


@pytest.mark.parametrize("bits", [3, *map(slow, (2, 5, 8, 16))])
def test_noise_is_of_the_position_in_every_layout_and_shape(bits: int) -> None:
    x = jnp.asarray(np.random.default_rng(1).uniform(-1, 1, 210), jnp.float32)
    seeds, one = jnp.array([5, 6], jnp.uint32), jnp.float32(1)
    numbers = quantize(x, one, seeds, levels=1, bits=32)
    for shape in [(210,), (2, 3, 35), (35, 6)]:
        codes = quantize(x.reshape(shape), one, seeds, levels=1, bits=bits)
        decoded = dequantize(codes, one, levels=1, bits=bits, shape=shape)
        np.testing.assert_array_equal(decoded.ravel(), numbers)
