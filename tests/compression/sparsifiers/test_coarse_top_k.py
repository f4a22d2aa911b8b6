"""Top-k with values of 2 bits against brute force."""

import numpy as np
import pytest

from jaxcomm.compression.sparsifiers import coarse_top_k
from tests.codecs import sent
from tests.slow import slow


def brute_force(x: np.ndarray, k: int, block: int) -> np.ndarray:
    found = np.zeros_like(x)
    for start in range(0, len(x), block):
        part = x[start : start + block]
        chosen = np.argsort(-np.abs(part), kind="stable")[:k]
        sizes = np.abs(part[chosen]).astype(np.float64)
        is_large = sizes > sizes.mean()
        for flag in {*is_large.tolist()}:
            own = chosen[is_large == flag]
            found[start + own] = np.sign(part[own]) * sizes[is_large == flag].mean()
    return found


@pytest.mark.parametrize(
    ("size", "k", "block"), [(37, 5, 16), slow(7, 9, 16), slow(5000, 64, 4096)]
)
def test_against_brute_force(size: int, k: int, block: int) -> None:
    x = np.random.default_rng(size).normal(size=size).astype(np.float32) ** 3
    codec = coarse_top_k(k=k, block_size=block)
    found = sent(codec, x)
    np.testing.assert_allclose(found, brute_force(x, k, block), rtol=1e-5)
    # A projection, whose error obeys the claim.
    left, whole = np.sum((x - found) ** 2), np.sum(x**2)
    np.testing.assert_allclose(left, whole - np.sum(found**2), rtol=1e-4)
    assert left <= (1 - codec.claims.contraction(size, 1)) * whole * (1 + 1e-5)


def test_zeros_and_equal_magnitudes() -> None:
    for x in (np.zeros(6), np.array([1.0, -1, 1, -1, 1, 1])):
        found = sent(coarse_top_k(k=2, block_size=4), x)
        np.testing.assert_array_equal(found, x * [1, 1, 0, 0, 1, 1])
