"""Rows of sparsifiers that draw coordinates, or take those above a threshold."""

import math
from collections.abc import Callable

import numpy as np

from tests.cases._case import COMMON_THRESHOLD, Case, all_reduce, feedback_row, row, word_bytes
from tests.cases._sparse import index_bits_repeated, quarter


def half(size: int) -> int:
    return max(round(size / 2), 1)


def wangni_probabilities(x: np.ndarray, k: int) -> np.ndarray:
    """Algorithm 3 of the paper, in float64."""
    peak = np.abs(x).max()
    if peak == 0:
        return np.zeros_like(x)
    magnitudes = np.abs(x) / peak
    p = np.minimum(k * magnitudes / magnitudes.sum(), 1)
    for _ in range(2):
        active = p < 1
        if not p[active].sum() > 0:
            break
        c = (k - len(p) + active.sum()) / p[active].sum()
        if c <= 1:
            break
        p = np.minimum(c * p, 1)
    return p


def wangni_moment(x: np.ndarray) -> float:
    p = wangni_probabilities(x, quarter(x.size))
    return float(sum(x[p > 0] ** 2 / p[p > 0]) - sum(x**2))


def bytes_of_quarter(size: int, value_bits: int) -> int:
    """Bytes of indices that may be one past the end, and of values."""
    count = quarter(size)
    return word_bytes(index_bits_repeated(count, size + 1)) + word_bytes(count * value_bits)


def own_feedback_row(name: str, bytes: Callable[[int], int]) -> Case:
    """A row of a codec that keeps its residual; `bytes` are those of one leaf."""
    return row(
        name,
        bytes=lambda sizes, n: (n - 1) * (sum(map(bytes, sizes)) + 4),
        random=False,
        feedback=True,
    )


def ada_comp_bytes(size: int) -> int:
    """Two per four: none, or one of four with a sign, 9 symbols in 4 bits; and the scale."""
    bins, width = -(-size // 4), min(size, 4)
    return word_bytes(bins * min(2, width) * math.ceil(math.log2(2 * width + 1))) + 4


SAMPLED = [
    row(
        "random_k",
        bytes=lambda sizes, n: all_reduce(4 * half(sum(sizes)) + 4, n),
        dtypes="float32",
        # With the same coordinates on all workers, errors do not average out.
        variance=lambda d, n: d / half(d) - 1,
        resolution=lambda n, d: d / half(d),
        moment=lambda x: (x.size / half(x.size) - 1) * float(np.sum(x**2)),
        common_draws=True,
    ),
    row(
        "random_k_feedback",
        bytes=lambda sizes, n: all_reduce(4 * quarter(sum(sizes)) + 4, n),
        dtypes="float32",
        contraction=lambda d: quarter(d) / d,
        moment=lambda x: (1 - quarter(x.size) / x.size) * float(np.sum(x**2)),
        common_draws=True,
    ),
    row(
        "wangni",
        bytes=lambda sizes, n: (n - 1) * (bytes_of_quarter(sum(sizes), 32) + 4),
        # Probabilities are multiples of 2**-24, or a part in a million smaller.
        variance=lambda d, n: (d / quarter(d) * (1 + 1e-5) - 1) / n,
        # What is sent is at most |x|_1 / k.
        resolution=lambda n, d: d / quarter(d),
        moment=wangni_moment,
    ),
    feedback_row(
        "threshold",
        bytes=lambda size: bytes_of_quarter(size, 32),
        contraction=None,
        alien=COMMON_THRESHOLD,
    ),
    own_feedback_row("ada_comp", ada_comp_bytes),
    own_feedback_row(
        "variance_based",
        # Four bits each, and a byte for the largest exponent.
        lambda size: (
            word_bytes(index_bits_repeated(quarter(size), size + 1))
            + word_bytes(4 * quarter(size) + 8)
        ),
    ),
]
