"""What rounding promises: no bias, the variance of two neighbours, noise of the position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantize import reference
from tests.pallas_kernels.quantize import oracle
from tests.slow import slow


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
