"""Rows of signs, ternary codes, powers of two, and rotations."""

from typing import Any

import ml_dtypes
import numpy as np

from tests.cases._case import (
    NO_MAGNITUDE,
    Case,
    Sizes,
    all_reduce,
    feedback_row,
    root,
    row,
    row_size,
    word_bytes,
)
from tests.cases._quantized import width_of


def _votes_bytes(sizes: Sizes, n: int) -> float:
    return 2 * (n - 1) * 4 * row_size(sum(sizes), 32 * n) + all_reduce(4, n)


def _signs_moment(x: np.ndarray) -> float:
    return np.sum(x**2) - np.abs(x).sum() ** 2 / x.size


def _ternary_moment(x: np.ndarray) -> float:
    return np.abs(x).max() * np.abs(x).sum() - np.sum(x**2)


def _e3m0_moment(x: np.ndarray) -> float:
    """Between neighbors of 0 and the seven powers of two below the largest magnitude."""
    peak = np.abs(x).max()
    share = np.abs(x) / (peak or 1)
    levels = np.concatenate([[0], 2.0 ** np.arange(-6, 1)])
    above = levels[np.searchsorted(levels, share)]
    below = levels[np.maximum(np.searchsorted(levels, share) - 1, 0)]
    return float(np.sum((above - share) * (share - below)) * peak**2)


def _mxfp4_bytes(size: int) -> int:
    return word_bytes(4 * size) + -(-size // 32)


def _mxfp8_moment(x: np.ndarray) -> float:
    """Between neighbors of all numbers of the format, times the power of two of each block."""
    bytes_of_format = np.arange(128, dtype=np.uint8)
    levels = bytes_of_format.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    levels = levels[np.isfinite(levels)]
    total = 0.0
    for start in range(0, x.size, 32):
        block = np.abs(x[start : start + 32])
        scale = 2.0 ** np.ceil(np.log2(max(block.max(), 2.0**-100) / 448))
        above = levels[np.searchsorted(levels, block / scale)] * scale
        below = levels[np.maximum(np.searchsorted(levels, block / scale) - 1, 0)] * scale
        total += np.sum((above - block) * (block - below))
    return total


def _natural_moment(x: np.ndarray) -> float:
    t = np.abs(x[x != 0])
    below = 2.0 ** np.floor(np.log2(t))
    return np.sum((2 * below - t) * (t - below))


def majority(updates: np.ndarray) -> np.ndarray:
    return np.sign(np.sign(updates).sum(axis=1))


def _majority_of_momenta(updates: np.ndarray) -> np.ndarray:
    momenta = [np.zeros_like(updates[0])]
    for each in updates:
        momenta.append(0.9 * momenta[-1] + each)
    return majority(np.stack(momenta[1:]))


def _columns(size: int) -> int:
    """Columns of a leaf; in the laws, only the kernel of 5 x 2 has several."""
    return 2 if size == 10 else 1


def _power_of_two(size: int) -> int:
    return 2 ** int(np.ceil(np.log2(max(size, 1))))


def _fields(size: int, width: int) -> int:
    """Bytes of fields of `width` bits: int8, or in whole words."""
    return size if width == 8 else 4 * -(-size // (32 // width))


def _hlo(width: int) -> str:
    return {8: "int8", 32: "int32"}.get(width, "uint32")


def _ternary_omega(d: int) -> float:
    return (d**0.5 - 1) / 2


def _terngrad(name: str, **claims: Any) -> Case:
    """A row of TernGrad with local scales: 16 codes per word, and one scale per leaf."""
    return row(
        name,
        bytes=lambda sizes, n: (n - 1) * (sum(4 * -(-d // 16) + 4 for d in sizes) + 4),
        resolution=lambda n, d: 1.0,
        **claims,
    )


SIGNS = [
    row(
        "sign_sgd",
        bytes=_votes_bytes,
        integer_sum=True,
        random=False,
        weighted=False,
        result=majority,
        zeros_drawn=True,
        alien=NO_MAGNITUDE,
    ),
    row(
        "signum",
        bytes=_votes_bytes,
        integer_sum=True,
        random=False,
        weighted=False,
        result=_majority_of_momenta,
        zeros_drawn=True,
        alien=NO_MAGNITUDE,
    ),
    feedback_row(
        "ef_sign_sgd",
        bytes=word_bytes,
        contraction=lambda d: 1 / d,
        statistics=1,
        moment=_signs_moment,
    ),
    feedback_row(
        "one_bit_sgd",
        bytes=lambda size: word_bytes(size) + 8 * _columns(size),
        contraction=lambda d: 1 / d,
    ),
    _terngrad("terngrad"),
    _terngrad(
        "terngrad_unclipped",
        variance=lambda d, n: _ternary_omega(d) / n,
        moment=_ternary_moment,
    ),
    row(
        "terngrad_shared",
        bytes=lambda sizes, n: all_reduce(
            sum(_fields(size, width_of(1, n)) + 4 for size in sizes) + 4, n
        ),
        dtypes=lambda n: {_hlo(width_of(1, n))},
        # The scale is that of all n d coordinates.
        variance=lambda d, n: _ternary_omega(n * d) / n,
        resolution=lambda n, d: 1.0,
        integer_sum=True,
    ),
    row(
        "natural_compression",
        bytes=lambda sizes, n: (n - 1) * (sum(sizes) + word_bytes(sum(sizes)) + 4),
        dtypes="uint8",
        variance=lambda d, n: 1 / 8 / n,
        resolution=lambda n, d: 1.0,
        contraction=lambda d: 1 - 1 / 8,
        moment=_natural_moment,
    ),
    row(
        "e3m0",
        bytes=lambda sizes, n: (n - 1) * (word_bytes(4 * sum(sizes)) + 4 + 4),
        variance=lambda d, n: (1 / 8 + d / 2**14) / n,
        resolution=lambda n, d: 0.5,
        contraction=lambda d: 1 - (1 / 8 + d / 2**14),
        moment=_e3m0_moment,
    ),
    row(
        "block_float",
        bytes=lambda sizes, n: (n - 1) * (sum(sizes) + -(-sum(sizes) // 32) + 4),
        dtypes="uint8",
        variance=lambda d, n: (1 / 256 + 32 * 2.0**-18 / 448**2) / n,
        resolution=lambda n, d: 1 / 8,
        contraction=lambda d: 1 - (1 / 256 + 32 * 2.0**-18 / 448**2),
        moment=_mxfp8_moment,
    ),
    feedback_row(
        "block_float_int8",
        bytes=lambda d: d + -(-d // 256),
        dtypes="uint8",
        contraction=lambda d: 1 - 256 / 127**2,
    ),
    feedback_row(
        "microscaling",
        bytes=lambda d: d + -(-d // 32),
        dtypes="uint8",
        contraction=lambda d: 59 / 60,
    ),
    feedback_row(
        "microscaling_mxfp4",
        bytes=lambda d: word_bytes(4 * d) + -(-d // 32),
        dtypes="uint8",
        contraction=lambda d: 13 / 16,
    ),
    feedback_row(
        "microscaling_nvfp4",
        bytes=lambda d: word_bytes(4 * d) + -(-d // 16) + 4,
        dtypes="uint8",
        contraction=lambda d: 7 / 8 - d / 28672**2,
    ),
    row(
        "two_stage_microscaling",
        bytes=lambda sizes, n: (
            2 * (n - 1) * _mxfp4_bytes(row_size(sum(sizes), n)) + all_reduce(4, n)
        ),
        dtypes="uint8",
        random=False,
    ),
    row(
        "rotated",
        bytes=lambda sizes, n: all_reduce(
            _fields(_power_of_two(sum(sizes)), width_of(15, n)) + 8, n
        ),
        dtypes=lambda n: {_hlo(width_of(15, n))},
        variance=lambda d, n: min(_power_of_two(d) / 15**2, (_power_of_two(d) / n) ** 0.5 / 15),
        # Steps of at most |x| / 15, of which a coordinate takes part in sqrt(d).
        resolution=lambda n, d: root(d) * root(_power_of_two(d)) / 15,
        with_codec=False,
        spreads=True,
    ),
    row(
        "rotated_blocks",
        # Blocks of 8 coordinates: one word of 4-bit fields and one float32 norm each.
        bytes=lambda sizes, n: (n - 1) * (8 * -(-sum(sizes) // 8) + 4),
        variance=lambda d, n: min(8 / 7**2, 8**0.5 / 7) / n,
        resolution=lambda n, d: root(min(d, 8)) * root(8) / 7,
        with_codec=False,
        spreads=True,
    ),
]
