"""Rows of compositions of codecs."""

import math

import numpy as np

from tests.cases._case import (
    COMMON_NOISE,
    LARGEST_OF_ALL,
    all_reduce,
    feedback_row,
    row,
    word_bytes,
)
from tests.cases._low_rank import KERNEL
from tests.cases._sampled import half
from tests.cases._sparse import index_bits, quarter, top_quarter


def _omega(d: int, levels: int) -> float:
    """Of dithering with the largest magnitude of one worker."""
    return min(d / levels**2, d**0.5 / levels)


def _levels(n: int) -> int:
    """The most levels whose sum over n workers fits in 8 bits."""
    return 255 // (2 * n)


def _cocktail_bytes(size: int) -> int:
    """The indices are those of half of the coordinates, which receivers draw."""
    drawn, sent = half(size), half(half(size))
    return word_bytes(index_bits(sent, drawn)) + sent


def _drawn_variance(d: int, n: int) -> float:
    """The selection is the same on all workers; roundings are independent."""
    k, s = half(d), _levels(n)
    return d / k * (1 + min(k / s**2, (k / n) ** 0.5 / s)) - 1


def _reserved_moment(x: np.ndarray) -> float:
    """Of rounding what remains without the quarter of largest magnitude, exactly."""
    least = np.sort(np.abs(x))[-quarter(x.size)]
    rest = np.where(np.abs(x) >= least, 0, x)
    step = np.abs(rest).max() / 7
    if step == 0:
        return 0.0
    fraction = rest / step - np.floor(rest / step)
    return float(np.sum(fraction * (1 - fraction)) * step**2)


def _chunks(size: int) -> tuple[int, int]:
    """How many, and coordinates of each: the leaf of 5 by 2 is cut into two of 3 by 2."""
    if size == math.prod(KERNEL):
        return 2, 6
    count = -(-size // 4)
    return count, -(-size // count)


def _demo_bytes(size: int) -> int:
    count, width = _chunks(size)
    sent = min(3, width)
    return count * (word_bytes(index_bits(sent, width)) + 4 * sent)


CHAINED = [
    feedback_row(
        "chain",
        bytes=_cocktail_bytes,
        dtypes="uint8",
        statistics=1,
        contraction=lambda d: half(half(d)) / d / (1 + _omega(half(half(d)), 127)),
        random=True,
        alien=LARGEST_OF_ALL,
    ),
    row(
        "chain_summed",
        bytes=lambda sizes, n: all_reduce(half(sum(sizes)) + 4 + 4, n),
        dtypes="int8",
        variance=_drawn_variance,
        resolution=lambda n, d: d / half(d) * (1 + 1 / _levels(n)),
        alien=COMMON_NOISE,
    ),
    row(
        "reserved",
        # Beside the extremes: fields of 4 bits, the norm of the rest, the flag.
        bytes=lambda sizes, n: (
            (n - 1) * (top_quarter(sum(sizes)) + word_bytes(4 * sum(sizes)) + 4 + 4)
        ),
        variance=lambda d, n: _omega(d, 7) * (1 - quarter(d) / d) / n,
        resolution=lambda n, d: 1 / 7,
        moment=_reserved_moment,
        extremes=quarter,
        alien=COMMON_NOISE,
    ),
    row(
        "demo",
        bytes=lambda sizes, n: (n - 1) * (sum(map(_demo_bytes, sizes)) + 4),
        random=False,
        # Three of the coefficients of a chunk, of which 4 by 4 coordinates have the most.
        contraction=lambda d: min(3 / min(d, 16), 1),
        feedback=True,
        discount=0.999,
    ),
]
