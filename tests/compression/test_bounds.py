"""What codecs state of their error: the numbers by hand, and inputs that come near them.

The laws of codecs check that what a row's codec states holds.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Codec
from jaxcomm.compression import blockwise, scaled
from jaxcomm.compression.quantizers import (
    cast,
    dither,
    exponential_dither,
    scaled_cast,
    sparse_dither,
)
from jaxcomm.testing._codec import decoded, require_contraction, require_variance
from tests.slow import slow

L2 = dither(levels=1, norm="l2")


def relative_error(codec: Codec, x: np.ndarray, count: int = 500) -> float:
    """The mean of sum_i |Q(x_i) - x_i|^2 / sum_i |x_i|^2, of [workers, d]."""
    lost = (decoded(codec, x, count, seed=3) - np.asarray(x, np.float32)) ** 2
    return float(lost.sum(axis=(1, 2)).mean() / np.sum(np.square(x)))


@pytest.mark.parametrize(
    ("codec", "size", "workers", "variance"),
    [
        (L2, 60, 4, 240**0.5),
        (dither(levels=3), 60, 4, 240**0.5 / 3),
        (dither(levels=15, norm="l2"), 60, 1, 60 / 15**2),
        (dither(bits=6), 60, 4, min(240 / 7**2, 240**0.5 / 7)),
        (exponential_dither(), 64, 3, 1 / 8),
        (blockwise(L2, 16), 1000, 2, 32**0.5),
        (sparse_dither(capacity=8), 60, 4, None),  # Beyond its capacity it is NaN.
    ],
)
def test_variances_by_hand(codec: Codec, size: int, workers: int, variance: float | None) -> None:
    stated = codec.claims.variance
    assert stated is None if variance is None else stated(size, workers) == pytest.approx(variance)
    assert codec.claims.contraction is None


@pytest.mark.parametrize(
    ("codec", "delta"),
    [
        (scaled(L2), 1 / (1 + 256**0.5)),
        (cast("bfloat16"), 1 - 2.0**-16),
        # Where float32 is out of range, rounding gives infinity, and no bound holds.
        (cast("float16"), None),
        (cast("float8_e4m3fn"), None),
        (blockwise(cast("float16"), 4), None),
        (blockwise(scaled_cast("float8_e5m2"), 4), 1 - 2.0**-6),
    ],
)
def test_contractions_by_hand(codec: Codec, delta: float | None) -> None:
    stated = codec.claims.contraction
    assert stated is None if delta is None else stated(64, 4) == pytest.approx(delta, rel=1e-3)


@pytest.mark.slow
def test_dither_nearly_attains_its_bound() -> None:
    # One level, constant vectors: sum of p (1 - p) of p = 1 / sqrt(n d) is sqrt(n d) - 1.
    for codec, together in ((L2, 4 * 400), (blockwise(L2, 16), 4 * 16)):
        error = relative_error(codec, np.ones((4, 400)))
        assert error == pytest.approx(together**0.5 - 1, rel=0.03)
    require_variance(L2, 240**0.5, size=60, workers=4, draws=500)


@pytest.mark.slow
def test_exponential_dither_nearly_attains_its_bound() -> None:
    # Of 4/3 of a power of two, an eighth of its square; the peak, a power of two, is exact.
    x = np.where(np.arange(64) == 0, 1, 1 / 3)
    error = relative_error(exponential_dither(), x[None])
    assert error == pytest.approx(63 / 9 / 8 / (1 + 63 / 9), rel=0.03)
    x = np.full(64, 2.0**-70)  # 2**-130 of the peak: whatever it is, it becomes zero.
    x[0] = 2.0**60
    assert relative_error(exponential_dither(), x[None], 1) == pytest.approx(63 * 2.0**-260)


def test_cast() -> None:
    require_contraction(cast("bfloat16"), 1 - 2.0**-16, size=64, workers=2, draws=1)
    # A tie, where rounding to nearest loses most.
    error = relative_error(cast("bfloat16"), np.full((1, 8), 1 + 2.0**-8), 1)
    assert error == pytest.approx(2.0**-16, rel=0.01)


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", *map(slow, ["float4_e2m1fn", "float8_e5m2", "float16"])]
)
def test_scaled_cast(dtype: str) -> None:
    codec, limits = scaled_cast(dtype), jnp.finfo(dtype)
    largest, smallest = float(limits.max), float(limits.smallest_normal)
    half = 2.0 ** -(limits.nmant + 1)
    shared, bound = (half**2 * (1 + n * 64 * (smallest / largest) ** 2) for n in (3, 1))
    assert codec.claims.contraction(64, 3) == pytest.approx(1 - shared)
    require_contraction(codec, 1 - bound, size=64, draws=1)
    # Ties of normal numbers, and of those below, where spacing no longer shrinks.
    ties = np.full((1, 64), (1 + half) * 2.0 ** (limits.maxexp - 2))
    below = np.full((1, 64), smallest * half)
    ties[0, 0] = below[0, 0] = largest
    errors = [relative_error(codec, x, 1) for x in (ties, below)]
    assert max(errors) <= bound * (1 + 1e-5)
    assert errors[0] > 0.5 * half**2 or limits.nmant > 9
