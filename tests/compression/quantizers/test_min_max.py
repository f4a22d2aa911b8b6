"""Levels from the least to the largest coordinate, and fields that hold sums of codes."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Context
from jaxcomm.compression.quantizers import min_max_dither
from jaxcomm.compression.quantizers._min_max import MinMax
from tests.codecs import draws, payload_of
from tests.slow import slow


@pytest.mark.parametrize("levels", [3, slow(2), slow(16)])
def test_values_are_levels_and_the_error_is_exact(levels: int) -> None:
    x = np.random.default_rng(levels).normal(size=40).astype(np.float32).astype(np.float64)
    sample = draws(min_max_dither(levels=levels), x, 4000)
    grid = np.linspace(x.min(), x.max(), levels)
    assert np.abs(sample[..., None] - grid).min(axis=-1).max() < 1e-5
    step = grid[1] - grid[0]
    part = (x - x.min()) / step % 1
    exact = step**2 * np.sum(part * (1 - part))
    errors = np.sum((sample - x) ** 2, axis=1)
    assert abs(errors.mean() - exact) < 6 * errors.std() / 4000**0.5 + 1e-6
    assert exact <= min_max_dither(levels=levels).claims.variance(40, 1) * np.sum(x**2)


def test_the_bound_is_nearly_attained() -> None:
    # One coordinate at each end, and all others halfway between levels.
    x = np.concatenate([[1.0, -1.0], np.zeros(98)])
    errors = np.sum((draws(min_max_dither(levels=2), x, 1000) - x) ** 2, axis=1)
    np.testing.assert_allclose(errors, 98.0)
    assert min_max_dither(levels=2).claims.variance(100, 1) * 2 == 100.0


@pytest.mark.slow
def test_two_levels_are_one_bit_and_workers_add_up() -> None:
    codec, x = min_max_dither(levels=2), jnp.linspace(-1, 1, 64)
    statistics = MinMax(jnp.float32(1), jnp.float32(1))
    for workers, words in ((1, 2), (3, 4), (255, 16), (256, 22), (10**5, 64)):
        context = Context.of(x).replace(statistics=statistics, workers=workers)
        payload, _ = codec.encode(context, x)
        assert payload.codes.shape == (words,)
        total = payload._replace(codes=payload.codes * jnp.uint32(workers))
        mean = codec.decode(context.received(workers), total)
        np.testing.assert_array_equal(mean, codec.decode(context.received(), payload))
    with pytest.raises(ValueError, match="At most 524288 `levels` fit in 32 bits"):
        payload_of(min_max_dither(levels=2**20), (3,), workers=2**13)


@pytest.mark.parametrize(
    "x",
    [[3.4e38, -3.4e38, 0.0], slow([3e-38, 3e-38]), slow([1e-37, -1e-37]), slow([]), slow(3.0)],
)
def test_edges_are_exact(x: object) -> None:
    sample = draws(min_max_dither(levels=3), x, 3)
    np.testing.assert_allclose(sample, np.broadcast_to(x, (3, *np.shape(x))), rtol=1e-6)
