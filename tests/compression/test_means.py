"""Sums in planes equal direct sums, at any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.compression._means import how_many, over_peak, peak, total
from tests.slow import slow


@pytest.mark.parametrize("size", [31, 2**16 + 1, *map(slow, [0, 1, 1025, 2**16, 2**17 + 31])])
def test_counts_and_peaks(size: int) -> None:
    draw = np.random.default_rng(size)
    marks, numbers = draw.random(size) < 0.3, draw.integers(-5, 9, size, np.int32)
    magnitudes = np.abs(draw.standard_normal(size)).astype(np.float32)
    for count in (total, how_many):
        assert jax.jit(count)(jnp.asarray(marks)) == np.count_nonzero(marks)
    assert jax.jit(total)(jnp.asarray(numbers)) == numbers.sum()
    assert jax.jit(peak)(jnp.asarray(magnitudes)) == magnitudes.max(initial=0)


@pytest.mark.parametrize("largest", [1e-3, 1e10])
def test_a_quotient_by_the_peak_has_its_derivative(largest: float) -> None:
    x = jnp.array([-largest / 4, largest], jnp.float32)
    quotient, of_x, of_peak = jax.jit(
        lambda x: (over_peak(x, x[1]), *jax.jacobian(over_peak, (0, 1))(x, x[1]))
    )(x)
    np.testing.assert_allclose(quotient, [-0.25, 1])
    np.testing.assert_allclose(of_x @ x, [-0.25, 1], rtol=1e-6)
    np.testing.assert_allclose(of_peak * largest, [0.25, -1], rtol=1e-6)
