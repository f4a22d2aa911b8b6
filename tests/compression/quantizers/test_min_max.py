"""Levels from the least to the largest coordinate, and fields that hold sums of codes."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Context
from jaxcomm.compression.quantizers import min_max_dither
from jaxcomm.compression.quantizers._min_max import MinMax
from tests.codecs import draws, payload_of


def test_the_bound_is_nearly_attained() -> None:
    # One coordinate at each end, and all others halfway between levels.
    x = np.concatenate([[1.0, -1.0], np.zeros(98)])
    errors = np.sum((draws(min_max_dither(levels=2), x, 1000) - x) ** 2, axis=1)
    np.testing.assert_allclose(errors, 98.0)
    assert min_max_dither(levels=2).claims.variance(100, 1) * 2 == 100.0


@pytest.mark.slow
def test_two_levels_take_one_bit_and_workers_sum() -> None:
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


@pytest.mark.parametrize("levels", [2, 5, 8])
def test_the_alphabet_is_no_larger_than_the_levels(levels: int) -> None:
    alphabet = min_max_dither(levels=levels).fast.integers.alphabet(Context.of(jnp.zeros(3)))
    assert (alphabet.number, alphabet.high - alphabet.low) == (3, levels - 1)
