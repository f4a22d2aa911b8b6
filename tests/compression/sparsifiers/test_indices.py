"""Indices come back from each code, whose length is the formula's and near the entropy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.compression.sparsifiers._sparse import (
    IndexCode,
    choose_layout,
    pack_indices,
    unpack_indices,
)
from tests.slow import slow


def round_trip(given: list[np.ndarray], layout: IndexCode) -> None:
    pack = jax.jit(jax.vmap(lambda indices: pack_indices(indices, layout)))
    words = pack(jnp.asarray(np.array(given), jnp.uint32))
    assert words.dtype == jnp.uint32 and words.shape == (len(given), -(-layout.bits // 32))
    unpacked = jax.jit(jax.vmap(lambda words: unpack_indices(words, layout)))(words)
    assert unpacked.dtype == jnp.uint32
    np.testing.assert_array_equal(unpacked, given)


def drawn(count: int, size: int) -> list[np.ndarray]:
    """At random, and where codes might stumble: all first, all last."""
    random = np.sort(np.random.default_rng(size).choice(size, count, replace=False))
    return [random, np.arange(count), np.arange(size - count, size)]


@pytest.mark.parametrize("size", [32, slow(1), slow(2), slow(333)])
def test_round_trip(size: int) -> None:
    for count in sorted({0, size // 5, size}):
        for distinct in (True, False):
            round_trip(drawn(count, size), choose_layout(count, size, distinct=distinct))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 40, 100])
def test_round_trip_of_each_code(count: int) -> None:
    for low in (0, 1, 3, 6):
        round_trip(drawn(count, 100), IndexCode("elias_fano", count, 100, 100, low))
    for code in ("fixed", "bitmap"):
        round_trip(drawn(count, 100), IndexCode(code, count, 100, 100, 0))


def test_repeated_indices_come_back() -> None:
    indices = np.array([3, 7, 7, 7, 100, 100])
    for layout in (
        choose_layout(6, 101, distinct=False),
        IndexCode("elias_fano", 6, 101, 101, 4),
        IndexCode("fixed", 6, 101, 101, 0),
    ):
        assert layout.code != "bitmap"
        round_trip([indices], layout)


@pytest.mark.parametrize("width", [5, slow(1), slow(4), slow(300)])
def test_round_trip_of_blocks(width: int) -> None:
    blocks, each = 7, min(2, width)
    rng = np.random.default_rng(width)
    inside = [np.sort(rng.choice(width, each, replace=False)) + b * width for b in range(blocks)]
    layout = choose_layout(blocks * each, blocks * width, block=width)
    round_trip([np.concatenate(inside)], layout)
    assert layout.bits <= blocks * each * math.ceil(math.log2(width))


@pytest.mark.parametrize(("count", "size"), [(1, 1000), (250, 1000), (2**14, 2**20)])
def test_length_of_elias_fano(count: int, size: int) -> None:
    layout = choose_layout(count, size)
    assert layout.code == "elias_fano" or layout.bits <= size
    # k l + k + floor((d - 1) / 2^l) for the best l.
    lengths = [count * low + count + (size - 1) // 2**low for low in range(30)]
    assert layout.bits == min(*lengths, size, count * math.ceil(math.log2(size)))
    # The information is log2 C(d, k), a little less than d H(k / d).
    ways = math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)
    information = ways / math.log(2)
    assert information <= layout.bits <= information + 0.8 * count + 1
