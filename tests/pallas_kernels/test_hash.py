"""The counter noise that kernels and references share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from pallas_kernels import _hash
from tests.pallas_kernels.hash_oracle import word
from tests.slow import slow


def drawn(positions: np.ndarray, first: int, second: int) -> np.ndarray:
    return np.asarray(_hash.bits(jnp.asarray(positions), jnp.uint32(first), jnp.uint32(second)))


def test_bits_are_the_formula() -> None:
    positions = np.array([0, 1, 12345, 2**31, 2**32 - 1], np.uint32)
    for seeds in [(0, 0), (3, 7), (2**32 - 1, 2**31 + 5)]:
        expected = [word(int(position), seeds) for position in positions]
        assert drawn(positions, *seeds).tolist() == expected


@pytest.mark.parametrize("stride", [1, slow(2), 128, slow(1024), slow(65536)])
def test_structured_positions_give_uniform_bits(stride: int) -> None:
    positions = (np.arange(2**16, dtype=np.uint64) * stride).astype(np.uint32)
    uniform = drawn(positions, 1, 2) / 2.0**32
    assert scipy.stats.kstest(uniform, "uniform").pvalue > 1e-6
    for lag in (1, 2, 128):
        assert abs(np.corrcoef(uniform[lag:], uniform[:-lag])[0, 1]) < 5 / 2**8


@pytest.mark.parametrize("which", [0, slow(1)])
def test_nearby_seeds_give_uniform_independent_bits(which: int) -> None:
    positions = np.arange(2**16, dtype=np.uint32)
    neighbors = [(10 + (which == 0) * k, 20 + (which == 1) * k) for k in range(3)]
    samples = [drawn(positions, *seeds) / 2.0**32 for seeds in neighbors]
    assert np.abs(np.corrcoef(samples) - np.eye(3)).max() < 5 / 2**8
    seeds = np.random.default_rng(which).integers(0, 2**32, (2, 2**12), np.uint32)
    seeds[1 - which] = 12345
    words = jax.vmap(_hash.bits, in_axes=(None, 0, 0))(jnp.uint32(9), *jnp.asarray(seeds))
    assert scipy.stats.kstest(np.asarray(words) / 2.0**32, "uniform").pvalue > 1e-6


def test_positions_are_those_of_the_flat_array_and_do_not_wrap() -> None:
    for shape in [(), (0,), (3, 4, 5)]:
        expected = np.arange(int(np.prod(shape)), dtype=np.uint32).reshape(shape)
        np.testing.assert_array_equal(_hash.positions(shape), expected, strict=True)
    for shape in [(2**32,), (2**16, 2**16)]:
        with pytest.raises(ValueError, match=r"2\*\*32 elements or more"):
            jax.eval_shape(lambda shape=shape: _hash.positions(shape))
    assert jax.eval_shape(lambda: _hash.positions((2**32 - 1,))).shape == (2**32 - 1,)
