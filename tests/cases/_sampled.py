"""Rows of sparsifiers that draw coordinates, or take those above a threshold."""

import math
from collections.abc import Callable
from functools import cache

import numpy as np

import jaxcomm
from jaxcomm import Codec
from jaxcomm.compression import scaled
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import ada_comp, random_k, threshold, variance_based, wangni
from tests.cases._case import COMMON_THRESHOLD, Case, all_reduce, feedback_case, word_bytes
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


def room_of_quarter(size: int, value_bits: int) -> int:
    """Bytes of indices that may be one past the end, and of values."""
    count = quarter(size)
    return word_bytes(index_bits_repeated(count, size + 1)) + word_bytes(count * value_bits)


def own_feedback_case(
    name: str, codec: Codec, bytes: Callable[[int], int], dtypes: set[str]
) -> Case:
    """A row of a codec that keeps its residual; `bytes` are those of one leaf."""
    return Case(
        name,
        cache(
            lambda axis_name="data", seed=0: jaxcomm.all_gather_mean(
                codec, seed=seed, axis_name=axis_name
            )
        ),
        bytes=lambda sizes, n: (n - 1) * (sum(map(bytes, sizes)) + 4),
        dtypes=lambda n: dtypes,
        unbiased=False,
        variance=None,
        random=False,
        codec=codec,
        feedback=True,
    )


def ada_comp_bytes(size: int) -> int:
    """Two per four: none, or one of four with a sign, 9 symbols in 4 bits; and the scale."""
    bins, width = -(-size // 4), min(size, 4)
    return word_bytes(bins * min(2, width) * math.ceil(math.log2(2 * width + 1))) + 4


_SCALED = scaled(random_k(ratio=0.25))

SAMPLED = [
    Case(
        "random_k",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.all_reduce_mean(
                random_k(ratio=0.5), seed=seed, axis_name=axis_name
            )
        ),
        bytes=lambda sizes, n: all_reduce(4 * half(sum(sizes)) + 4, n),
        dtypes=lambda n: {"f32"},
        unbiased=True,
        # With the same coordinates on all workers, errors do not average out.
        variance=lambda d, n: d / half(d) - 1,
        resolution=lambda n, d: d / half(d),
        codec=random_k(ratio=0.5),
        compressor=random_k(ratio=0.5),
        moment=lambda x: (x.size / half(x.size) - 1) * float(np.sum(x**2)),
        common_coins=True,
    ),
    Case(
        "random_k_feedback",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.all_reduce_mean(
                error_feedback(_SCALED), seed=seed, axis_name=axis_name
            )
        ),
        bytes=lambda sizes, n: all_reduce(4 * quarter(sum(sizes)) + 4, n),
        dtypes=lambda n: {"f32"},
        unbiased=False,
        variance=None,
        codec=error_feedback(_SCALED),
        compressor=_SCALED,
        contraction=lambda d: quarter(d) / d,
        moment=lambda x: (1 - quarter(x.size) / x.size) * float(np.sum(x**2)),
        feedback=True,
        common_coins=True,
    ),
    Case(
        "wangni",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.all_gather_mean(
                wangni(ratio=0.25), seed=seed, axis_name=axis_name
            )
        ),
        bytes=lambda sizes, n: (n - 1) * (room_of_quarter(sum(sizes), 32) + 4),
        dtypes=lambda n: {"u32"},
        unbiased=True,
        # Probabilities are multiples of 2**-24, or a part in a million smaller.
        variance=lambda d, n: (d / quarter(d) * (1 + 1e-5) - 1) / n,
        # What is sent is at most |x|_1 / k.
        resolution=lambda n, d: d / quarter(d),
        codec=wangni(ratio=0.25),
        compressor=wangni(ratio=0.25),
        moment=wangni_moment,
    ),
    feedback_case(
        "threshold",
        threshold(0.5, ratio=0.25),
        bytes=lambda size: room_of_quarter(size, 32),
        dtypes={"u32"},
        contraction=None,
        alien=COMMON_THRESHOLD,
    ),
    own_feedback_case("ada_comp", ada_comp(block_size=4, capacity=2), ada_comp_bytes, {"u32"}),
    own_feedback_case(
        "variance_based",
        variance_based(alpha=0.5, ratio=0.25),
        # Four bits each, and a byte for the largest exponent.
        lambda size: (
            word_bytes(index_bits_repeated(quarter(size), size + 1))
            + word_bytes(4 * quarter(size) + 8)
        ),
        {"u32"},
    ),
]
