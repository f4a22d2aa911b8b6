"""Random bits: reproducible on all backends, different for all positions and seeds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxcomm import _noise
from tests.aggregation.runs import refuse


def _uniform(key: jax.Array, size: int = 2**18) -> np.ndarray:
    return np.asarray(_noise.bits(key, (size,)), np.float64) / 2**32


def test_bits_are_uniform_and_uncorrelated() -> None:
    keys = [
        _noise.keys_per_unit(jax.random.key(0), jnp.uint32(step), 2, jnp.int32(worker))[unit]
        for step, unit, worker in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    ]
    samples = [_uniform(key.private) for key in keys] + [_uniform(keys[0].shared)]
    for sample in samples:
        assert scipy.stats.kstest(sample, "uniform").pvalue > 1e-6
        lagged = np.corrcoef(sample[1:], sample[:-1])[0, 1]
        assert abs(lagged) < 5 / sample.size**0.5
    off_diagonal = np.corrcoef(samples) - np.eye(len(samples))
    assert np.abs(off_diagonal).max() < 5 / samples[0].size ** 0.5


def test_every_bit_is_fair() -> None:
    words = np.asarray(_noise.bits(jax.random.key(1), (2**16,)))
    ones = (words[:, None] >> np.arange(32, dtype=np.uint32) & 1).mean(axis=0)
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / 2**8


def test_bits_do_not_depend_on_the_shape() -> None:
    key = jax.random.key(2)
    np.testing.assert_array_equal(_noise.bits(key, (6, 4)).ravel(), _noise.bits(key, (24,)))


def test_a_counter_that_would_wrap_is_refused() -> None:
    many = lambda: _noise.bits(jax.random.key(0), (2**16, 2**16))  # noqa: E731
    refuse(r"`shape`=\(65536, 65536\)", lambda: jax.eval_shape(many))


@pytest.mark.parametrize(
    "key",
    [
        jnp.zeros(2, jnp.uint32),
        jax.random.split(jax.random.key(0), 2),
        jax.random.key(0, impl="rbg"),  # Differs under `jax.vmap`.
    ],
    ids=["untyped", "several", "rbg"],
)
def test_other_keys_are_refused(key: jax.Array) -> None:
    refuse("`key` must be one typed threefry2x32 key", lambda: _noise.require_key(key))
