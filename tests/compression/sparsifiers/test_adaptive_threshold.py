"""The same part of either sign passes, however many coordinates have it."""

import numpy as np
import pytest

from jaxcomm.compression.sparsifiers import adaptive_threshold
from tests.codecs import sent
from tests.slow import slow


def expected(ratio: float, x: np.ndarray) -> np.ndarray:
    result = np.zeros(x.size)
    for sign in (1, -1):
        places = [j for j in np.argsort(-sign * x) if sign * x[j] > 0]
        places = places[: max(int(ratio * len(places)), 1)]
        result[places] = np.mean(x[places]) if places else 0
    return result


@pytest.mark.parametrize("ratio", [0.25, slow(0.01), slow(0.999), slow(1.0)])
def test_each_sign_has_its_share(ratio: float) -> None:
    codec = adaptive_threshold(ratio=ratio)
    for positive in (0, 1, 40, 79, 80):
        rng = np.random.default_rng(positive)
        x = np.abs(rng.normal(size=80)) * np.where(np.arange(80) < positive, 1, -1)
        rng.shuffle(x)
        result = sent(codec, x)
        np.testing.assert_allclose(result, expected(ratio, x), rtol=2e-6, atol=1e-7)
        left = np.sum((x - result) ** 2) / np.sum(x**2)
        assert 1 - left >= codec.claims.contraction(80, 1) * (1 - 1e-6)


@pytest.mark.slow
def test_zeros_are_not_sent_and_edges_hold() -> None:
    half, least, whole = (adaptive_threshold(ratio=ratio) for ratio in (0.5, 0.01, 1.0))
    sparse, huge = [0.0, 0.0, 3.0, 0.0, -1.0, 0.0, 0.0, 0.0], [3e38, 3e38, -1e-37, -1e-37]
    np.testing.assert_allclose(sent(half, sparse), sparse, rtol=1e-6)
    np.testing.assert_allclose(sent(whole, huge), huge, rtol=1e-6)
    for x in ([], -2.0, [1.0, -4.0]):
        np.testing.assert_allclose(sent(least, x), x, rtol=1e-6)
