"""NumPy, written from the formulas alone: it shares no code with the package."""

from typing import NamedTuple

import numpy as np

from tests.pallas_kernels.hash_oracle import words
from tests.slow import slow


class Case(NamedTuple):
    """How numbers are quantized."""

    levels: int
    bits: int


CASES = [
    Case(1, 2),
    Case(3, 3),
    Case(7, 4),
    Case(15, 5),
    Case(20, 6),
    Case(63, 7),
    Case(127, 8),
    Case(100, 9),
    Case(511, 10),
    Case(3, 11),
    Case(2047, 12),
    Case(1000, 13),
    Case(8191, 14),
    Case(16383, 15),
    Case(32767, 16),
    Case(2**20, 32),
    Case(2**24 - 1, 32),
]
# Whole words of fields, words with bits to spare, and fields that are bytes or words themselves.
BY_WIDTH = [case if case.bits in (2, 4, 5, 8, 11, 16, 32) else slow(case) for case in CASES]


def _to_float32_digits(x: np.ndarray) -> np.ndarray:
    """float64 rounded to the 24 digits of a float32, whose exponents do not end."""
    significand, exponent = np.frexp(x)
    return np.ldexp(significand.astype(np.float32).astype(np.float64), exponent)


def _digits(levels: int) -> int:
    """f: the most binary digits after the point with which `levels` fit."""
    limit = 2**22 if levels < 128 else 2**31
    digits = 0
    while (levels + 1) * 2 ** (digits + 1) <= limit:
        digits += 1
    return digits


def expected_codes(x: np.ndarray, scale: float, levels: int) -> np.ndarray:
    """levels x / scale, float64, a multiple of 2**-f: what codes are in the mean over all noise."""
    if not (2.0**-126 <= scale < np.inf):
        return np.zeros(x.shape)
    wide, one = x.astype(np.float64), 2.0 ** _digits(levels)
    factor = _to_float32_digits(np.float64(levels) * one / np.float64(scale))
    wide = np.where(np.isnan(wide) | (np.abs(wide) < 2.0**-126), 0, wide)
    finite = np.clip(wide, -(2.0**128), 2.0**128)
    within = np.clip(_to_float32_digits(finite * factor), -levels * one, levels * one)
    return (np.rint(within) if levels < 128 else np.trunc(within)) / one


def codes_of(x: np.ndarray, scale: float, seeds: np.ndarray, levels: int) -> np.ndarray:
    """floor(levels x / scale + u), where both terms are multiples of 2**-f."""
    one = 2 ** _digits(levels)
    draws = words(x.size, seeds) // np.uint64(2**32 // one)
    sums = expected_codes(x, scale, levels).ravel() + draws.astype(np.float64) / one
    return np.floor(sums).astype(np.int64).reshape(x.shape)


def fields_of(codes: np.ndarray, case: Case) -> np.ndarray:
    """Codes as they travel."""
    if case.bits == 8:
        return codes.astype(np.int8)
    if case.bits == 32:
        return codes.astype(np.int32)
    fields = 32 // case.bits
    width = -(-codes.size // fields)
    packed = np.zeros(width, np.uint64)
    for index, code in enumerate(codes.ravel()):
        field, word = divmod(index, width)
        packed[word] += np.uint64((int(code) + case.levels) * 2 ** (field * case.bits))
    return packed.astype(np.uint32)


def numbers(shape: tuple[int, ...], scale: float) -> np.ndarray:
    """float32 of many magnitudes up to `scale`, and special values while they fit."""
    generator = np.random.default_rng(len(shape))
    size = int(np.prod(shape))
    x = generator.uniform(-1, 1, size) * np.exp2(-generator.integers(0, 40, size) // 2.0) * scale
    special = [scale, -scale, np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 0.0, -0.0, 2.0**-126]
    special += [-(2.0**-149), 2.0**-127, scale * 1.5, -scale * 2.0]
    x[: len(special)] = special[:size]
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(np.float32).reshape(shape)
