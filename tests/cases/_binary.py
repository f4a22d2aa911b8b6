"""Rows that send means in place of values, fixed thresholds, and levels fitted to the data."""

import numpy as np

from tests.cases._case import (
    COMMON_MEANS,
    COMMON_THRESHOLD,
    all_reduce,
    feedback_row,
    row,
    row_size,
    word_bytes,
)
from tests.cases._quantized import width_of
from tests.cases._sparse import index_bits, index_bits_repeated, quarter


def _stc_bytes(size: int) -> int:
    """Indices, a sign for each, a mean."""
    return word_bytes(index_bits(quarter(size), size)) + word_bytes(quarter(size)) + 4


def _sbc_bytes(size: int) -> int:
    """Indices and a mean."""
    return word_bytes(index_bits_repeated(quarter(size), size + 1)) + 4


def _adaptive_places(size: int) -> int:
    """A quarter of either sign, rounded down, but at least one."""
    return min(max(size // 4 + 1, 2), size)


def _adaptive_bytes(size: int) -> int:
    """Indices, a sign for each, two means."""
    places = _adaptive_places(size)
    return word_bytes(index_bits_repeated(places, size + 1)) + word_bytes(places) + 8


def _projected(x: np.ndarray, *sent: np.ndarray) -> float:
    """The residual of x if each of the sent parts is replaced by its mean."""
    parts = [part for part in sent if part.size]
    return np.sum(x**2) - sum(np.sum(part) ** 2 / part.size for part in parts)


def _stc_moment(x: np.ndarray) -> float:
    return _projected(x, np.sort(np.abs(x))[::-1][: quarter(x.size)])


def _sbc_moment(x: np.ndarray) -> float:
    sides = [np.sort(side[side > 0])[::-1][: quarter(x.size)] for side in (x, -x)]
    return _projected(x, max(sides, key=np.sum))


def _adaptive_moment(x: np.ndarray) -> float:
    sides = [np.sort(side[side > 0])[::-1] for side in (x, -x)]
    return _projected(x, *(side[: max(side.size // 4, 1)] for side in sides))


def _one_bit_moment(x: np.ndarray) -> float:
    return _projected(x, x[x >= 0], x[x < 0])


def _min_max_moment(levels: int, x: np.ndarray) -> float:
    step = (x.max() - x.min()) / (levels - 1)
    part = (x - x.min()) / step % 1 if step else 0 * x
    return np.sum(step**2 * part * (1 - part))


def _lanes(size: int, largest: int) -> int:
    """Bytes of the fields that hold 0 to `largest`, as many per word as fit."""
    return 4 * -(-size // (32 // largest.bit_length()))


def _ternary_bytes(size: int, n: int) -> int:
    """The bytes for sums of n codes in -1, 0, 1."""
    width = width_of(1, n)
    return size if width == 8 else 4 * -(-size // (32 // width))


BINARY = [
    feedback_row(
        "stc",
        bytes=_stc_bytes,
        contraction=lambda d: min(quarter(d) / d, 1 / quarter(d)),
        moment=_stc_moment,
    ),
    row(
        "stc_two_stage",
        bytes=lambda sizes, n: (
            2 * (n - 1) * sum(_stc_bytes(row_size(size, n)) for size in sizes) + all_reduce(4, n)
        ),
        random=False,
    ),
    feedback_row(
        "sbc",
        bytes=_sbc_bytes,
        contraction=lambda d: (
            1 / (quarter(d) + max(quarter(d), (d - 1) / quarter(d))) if d > 1 else 1.0
        ),
        moment=_sbc_moment,
    ),
    feedback_row(
        "adaptive_threshold",
        bytes=_adaptive_bytes,
        contraction=lambda d: min(max(1 / 8, 1 / d), 1 / max(d // 4, 1)),
        moment=_adaptive_moment,
    ),
    feedback_row(
        "one_bit",
        bytes=word_bytes,
        contraction=lambda d: 1 / d,
        statistics=2,
        in_one=True,
        moment=_one_bit_moment,
        alien=COMMON_MEANS,
    ),
    feedback_row(
        "fixed_threshold",
        bytes=lambda size: word_bytes(2 * size),
        contraction=None,
        alien=COMMON_THRESHOLD,
    ),
    row(
        "fixed_threshold_summed",
        bytes=lambda sizes, n: all_reduce(_ternary_bytes(sum(sizes), n) + 4, n),
        dtypes=lambda n: {"int8" if width_of(1, n) == 8 else "uint32"},
        integer_sum=True,
        random=False,
        alien=COMMON_THRESHOLD,
    ),
    row(
        "adaptive_levels",
        # Seven values, in three bits, and the three levels.
        bytes=lambda sizes, n: (n - 1) * (word_bytes(3 * sum(sizes)) + 12 + 4),
        # Whatever the levels are, no more than of ternary codes.
        variance=lambda d, n: (d**0.5 - 1) / 2 / n,
        resolution=lambda n, d: 1.0,
        fitted=True,
    ),
    row(
        "min_max_dither",
        bytes=lambda sizes, n: (n - 1) * (_lanes(sum(sizes), 15) + 8 + 4),
        variance=lambda d, n: d / (2 * 15**2) / n,
        resolution=lambda n, d: 2 / 15,
        moment=lambda x: _min_max_moment(16, x),
        fitted=True,
    ),
    row(
        "min_max_dither_summed",
        bytes=lambda sizes, n: all_reduce(_lanes(sum(sizes), 4 * n) + 8 + 4, n),
        # The range is that of all n d coordinates: its square is at most twice their squares' sum.
        variance=lambda d, n: d / (2 * 4**2),
        resolution=lambda n, d: 2 / 4,
        integer_sum=True,
        fitted=True,
    ),
]
