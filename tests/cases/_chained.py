"""Rows of compositions of codecs."""

import math
from functools import cache

import numpy as np

import jaxcomm
from jaxcomm.compression import chain, cosine, reserved, scaled
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import random_k, top_k
from tests.cases._case import (
    COMMON_NOISE,
    LARGEST_OF_ALL,
    Case,
    all_reduce,
    feedback_case,
    word_bytes,
)
from tests.cases._low_rank import KERNEL
from tests.cases._sampled import half
from tests.cases._sparse import index_bits, quarter, top_quarter

_COCKTAIL = chain(scaled(random_k(ratio=0.5)), top_k(ratio=0.5), scaled(dither(bits=8)))
_DRAWN = chain(random_k(ratio=0.5), dither(bits=8))
_RESERVED = reserved(dither(bits=4), top_k(ratio=0.25))


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


_COSINES = cosine(top_k(k=3), 4)


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
    feedback_case(
        "chain",
        _COCKTAIL,
        bytes=_cocktail_bytes,
        dtypes={"u8"},
        statistics=1,
        contraction=lambda d: half(half(d)) / d / (1 + _omega(half(half(d)), 127)),
        random=True,
        alien=LARGEST_OF_ALL,
    ),
    Case(
        "chain_summed",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.all_reduce_mean(
                _DRAWN, seed=seed, axis_name=axis_name
            )
        ),
        bytes=lambda sizes, n: all_reduce(half(sum(sizes)) + 4 + 4, n),
        dtypes=lambda n: {"s8"},
        unbiased=True,
        variance=_drawn_variance,
        resolution=lambda n, d: d / half(d) * (1 + 1 / _levels(n)),
        codec=_DRAWN,
        compressor=_DRAWN,
        alien=COMMON_NOISE,
    ),
    Case(
        "reserved",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.all_gather_mean(
                _RESERVED, seed=seed, axis_name=axis_name
            )
        ),
        # Beside the extremes: fields of 4 bits, the norm of the rest, the flag.
        bytes=lambda sizes, n: (
            (n - 1) * (top_quarter(sum(sizes)) + word_bytes(4 * sum(sizes)) + 4 + 4)
        ),
        dtypes=lambda n: {"u32"},
        unbiased=True,
        variance=lambda d, n: _omega(d, 7) * (1 - quarter(d) / d) / n,
        resolution=lambda n, d: 1 / 7,
        codec=_RESERVED,
        compressor=_RESERVED,
        moment=_reserved_moment,
        extremes=quarter,
        alien=COMMON_NOISE,
    ),
    Case(
        "demo",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.demo(axis_name, k=3, block_size=4, seed=seed)
        ),
        bytes=lambda sizes, n: (n - 1) * (sum(map(_demo_bytes, sizes)) + 4),
        dtypes=lambda n: {"u32"},
        unbiased=False,
        variance=None,
        random=False,
        codec=error_feedback(_COSINES, decay=0.999),
        compressor=_COSINES,
        # Three of the coefficients of a chunk, of which 4 by 4 coordinates have the most.
        contraction=lambda d: min(3 / min(d, 16), 1),
        feedback=True,
        discount=0.999,
    ),
]
