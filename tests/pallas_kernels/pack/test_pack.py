"""Fields of words: reference and kernels are what the formula says."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.pack import bits_for_sum, pack, unpack
from tests.pallas_kernels.workloads import interpreted
from tests.slow import slow

WIDTHS = (*range(1, 17), 32)


def words_of(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Every number at its field, by arithmetic alone."""
    numbers = numbers.ravel().astype(np.uint64)
    words = np.zeros(-(-len(numbers) // (32 // bits)), np.uint64)
    for j, number in enumerate(numbers):
        words[j % len(words)] += number * np.uint64(2 ** (bits * (j // len(words))))
    return words.astype(np.uint32)


def numbers_below(limit: int, size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, limit, size, dtype=np.uint64).astype(np.uint32)


@pytest.mark.parametrize(
    "bits", [bits if bits in (1, 3, 16, 32) else slow(bits) for bits in WIDTHS]
)
def test_words_are_those_of_the_formula(bits: int) -> None:
    @jax.jit
    def there_and_back(numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        words = pack(numbers, bits=bits)
        return words, unpack(words, bits=bits, shape=numbers.shape)

    for shape in ((1,), (129,), (2, 7, 15), (), (3, 0)):
        numbers = numbers_below(2**bits, int(np.prod(shape))).reshape(shape)
        words, again = there_and_back(jnp.asarray(numbers))
        np.testing.assert_array_equal(words, words_of(numbers, bits), strict=True)
        np.testing.assert_array_equal(again, numbers, strict=True)


@pytest.mark.parametrize(
    ("name", "bits", "size", "dtype"),
    [
        ("mosaic_tpu", 3, 5000, "uint32"),
        ("mosaic_gpu", 10, 700, "uint32"),
        slow("mosaic_tpu", 1, 300_000, "bool"),
        slow("mosaic_gpu", 1, 17_000, "bool"),
        slow("mosaic_gpu", 32, 1, "uint32"),
        # What is not promised is at least the same on every backend: too large numbers spill.
        slow("mosaic_tpu", 16, 900, "too large"),
        slow("mosaic_gpu", 16, 900, "too large"),
    ],
)
def test_kernels_are_the_reference(name: Any, bits: int, size: int, dtype: str) -> None:
    """In every width that has whole or partial words, and of every dtype."""
    numbers = jnp.asarray(numbers_below(2**32 if dtype == "too large" else 2**bits, size))
    numbers = numbers if dtype == "too large" else numbers.astype(dtype)
    options = {"bits": bits, "shape": (size,)}
    expected = jax.jit(functools.partial(pack, bits=bits))(numbers)
    with interpreted():
        words = jax.jit(functools.partial(pack, bits=bits, implementation=name))(numbers)
        again = jax.jit(functools.partial(unpack, **options, implementation=name))(words)
    np.testing.assert_array_equal(words, expected, strict=True)
    np.testing.assert_array_equal(again, unpack(expected, **options), strict=True)


@pytest.mark.parametrize(("largest", "workers"), [(1, 255), slow(6, 5), slow(2**16 - 1, 1)])
def test_sums_of_words_are_words_of_sums(largest: int, workers: int) -> None:
    bits = bits_for_sum(largest, workers)
    numbers = np.stack([numbers_below(largest + 1, 500, seed) for seed in range(workers)])
    numbers[:, 17] = largest
    each = jax.vmap(functools.partial(pack, bits=bits))(jnp.asarray(numbers))
    words = jnp.sum(each, axis=0, dtype=jnp.uint32)
    np.testing.assert_array_equal(unpack(words, bits=bits, shape=(500,)), numbers.sum(axis=0))


def test_width_for_a_sum_is_the_smallest() -> None:
    for largest, workers in [(1, 1), (1, 8), (254, 2), (2**15, 2), (2**32 - 1, 1)]:
        bits = bits_for_sum(largest, workers)
        assert largest * workers < 2**bits
        assert all(largest * workers >= 2**narrower for narrower in WIDTHS if narrower < bits)
