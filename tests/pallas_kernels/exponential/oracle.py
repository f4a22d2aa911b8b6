"""`exponential` in NumPy, from the formulas; shares nothing with the library."""

import numpy as np

from tests.pallas_kernels.hash_oracle import words

TINY = np.float32(2.0**-126)


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < TINY, np.float32(0), x)


@np.errstate(all="ignore")
def encode(x: np.ndarray, scale: float, seeds: tuple[int, int], headroom: int) -> np.ndarray:
    """uint8 codes of float32[size], with mantissa and exponent from `frexp`."""
    scale = np.float32(scale)
    lift = np.float32(2.0**-64 if scale >= 2.0**60 else 2.0**64 if scale < 2.0**-60 else 1)
    most = np.float32(2.0**-headroom)
    factor = most / (scale * lift) if scale >= TINY else np.float32(0)
    y = flushed(flushed(flushed(x) * lift) * factor)
    y = np.clip(np.where(np.isnan(y), np.float32(0), y), -most, most)
    mantissa, exponent = np.frexp(np.abs(y))  # |y| = mantissa 2**exponent, mantissa in [1/2, 1)
    fraction = (2 * mantissa.astype(np.float64) - 1) * 2**23
    carries = fraction + words(x.size, seeds) // np.uint64(2**9) >= 2**23
    power = 1 - exponent - carries
    codes = np.where(y != 0, power + np.where(y < 0, 128, 0), 0)
    return codes.astype(np.uint8)


def decode(codes: np.ndarray, scale: float, headroom: int, count: int = 1) -> np.ndarray:
    """float32 of uint8 codes."""
    power = np.ldexp(1.0, headroom - (codes % 128).astype(int)).astype(np.float32)
    signed = np.where(codes % 128 == 0, 0, np.where(codes >= 128, -power, power))
    return signed.astype(np.float32) / np.float32(count) * np.float32(scale)


def add(a: np.ndarray, b: np.ndarray, seeds: tuple[int, int]) -> np.ndarray:
    """uint8 codes of the sums: rounds up with the probability that is unbiased."""
    value = lambda code: decode(code, 1.0, 0).astype(np.float64)  # noqa: E731
    # As a float32, whose smallest part of a mantissa is the smallest probability.
    total = (value(a) + value(b)).astype(np.float32).astype(np.float64)
    mantissa, exponent = np.frexp(np.abs(total))
    carries = (2 * mantissa - 1) * 2**23 + words(a.size, seeds) // np.uint64(2**9) >= 2**23
    power = np.maximum(1 - exponent - carries, 1)  # There is no code for 2**0.
    return np.where(total == 0, 0, power + np.where(total < 0, 128, 0)).astype(np.uint8)
