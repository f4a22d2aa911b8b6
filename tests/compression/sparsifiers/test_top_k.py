"""Limits of top-k, its blocks, and the threshold from a sample."""

from typing import Any

import numpy as np
import pytest

from jaxcomm.compression.sparsifiers import top_k
from tests.codecs import sent
from tests.slow import slow

SAMPLED = {k: top_k(k=k, sample_ratio=0.1) for k in (80, 150)}


def exact(x: np.ndarray, k: int) -> np.ndarray:
    """x at its k largest magnitudes, which are distinct."""
    return np.where(np.abs(x) >= np.sort(np.abs(x), axis=None)[-k], x, 0)


def normal(*size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


@pytest.mark.parametrize(
    ("options", "k"), [({"k": 3}, 3), slow({"ratio": 1.0}, 24), slow({"k": 50}, 24)]
)
def test_the_largest(options: dict[str, Any], k: int) -> None:
    x, codec = normal(2, 3, 4), top_k(**options)
    np.testing.assert_array_equal(sent(codec, x), exact(x, k))
    assert codec.claims.contraction(24, 1) == k / 24
    assert sent(codec, 3) == 3


def test_each_block_sends_its_own() -> None:
    x = (normal(22) * 10.0 ** np.repeat([0, 3, -3], [8, 8, 6])).astype(np.float32)
    expected = np.concatenate([exact(x[:8], 2), exact(x[8:16], 2), exact(x[16:], 2)])
    np.testing.assert_array_equal(sent(top_k(k=2, block_size=8), x), expected)


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_a_sample_finds_the_largest_or_half_as_many(seed: int) -> None:
    # The estimate of the threshold varies; what is chosen are the largest all the same.
    x = np.random.default_rng(seed).standard_t(3, size=4000).astype(np.float32)
    found = sent(SAMPLED[80], x)
    count = np.count_nonzero(found)
    assert 40 <= count <= 80
    np.testing.assert_array_equal(found, exact(x, count))


@pytest.mark.parametrize("scale", [1e3, slow(1e-3)])
def test_misleading_samples_are_rejected(scale: float) -> None:
    x = normal(1000, seed=1)
    x[::10] *= np.float32(scale)
    np.testing.assert_array_equal(sent(SAMPLED[150], x), exact(x, 150))
    assert np.count_nonzero(sent(SAMPLED[150], np.full(1000, -0.5))) == 150


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"ratio": 0.1, "k": 3}, "ratio"),
        ({"k": 2, "block_size": 4, "sample_ratio": 0.1}, "sample_ratio"),
        ({"k": 2, "value_dtype": "float16"}, "value_dtype"),
    ],
)
def test_options_that_do_not_go_together(options: dict, name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        top_k(**options)
