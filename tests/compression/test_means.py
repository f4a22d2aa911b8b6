"""Sums in planes equal direct sums, at any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.compression._means import how_many, peak, total

SIZES = [0, 1, 31, 1023, 1025, 2**16, 2**16 + 1, 2**17 + 31]


@pytest.mark.parametrize("size", SIZES)
def test_counts_and_peaks(size: int) -> None:
    draw = np.random.default_rng(size)
    marks, numbers = draw.random(size) < 0.3, draw.integers(-5, 9, size, np.int32)
    magnitudes = np.abs(draw.standard_normal(size)).astype(np.float32)
    for count in (total, how_many):
        assert jax.jit(count)(jnp.asarray(marks)) == np.count_nonzero(marks)
    assert jax.jit(total)(jnp.asarray(numbers)) == numbers.sum()
    assert jax.jit(peak)(jnp.asarray(magnitudes)) == magnitudes.max(initial=0)
