"""Rows of sparsifiers."""

import math
from functools import cache

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import coarse_top_k, top_k
from tests.cases._case import LARGEST_OF_ALL, Case, all_reduce, feedback_case, row_size, word_bytes


def quarter(size: int) -> int:
    return max(round(size / 4), 1)


def index_bits(count: int, size: int) -> int:
    """Bytes of ascending indices below `size`: fixed width, Elias-Fano, or a bitmap."""
    fixed = count * math.ceil(math.log2(max(size, 1)))
    elias_fano = [
        count * low + count + ((size - 1) >> low if count else 0)
        for low in range(size.bit_length())
    ]
    return min(fixed, size, *elias_fano)


def index_bits_repeated(count: int, size: int) -> int:
    """The same if an index may occur twice, which a bitmap cannot represent."""
    fixed = count * math.ceil(math.log2(max(size, 1)))
    return min(fixed, *(count * low + count + ((size - 1) >> low) for low in range(30)))


def top_quarter(size: int) -> int:
    return word_bytes(index_bits(quarter(size), size)) + 4 * quarter(size)


def two_of_four(size: int) -> int:
    """Two indices and 2 bits for each of them, and two magnitudes, of each block of four."""
    blocks, width = -(-size // 4), min(size, 4)
    count = blocks * min(2, width)
    fixed = count * math.ceil(math.log2(max(width, 1)))
    indices = min(fixed, index_bits(count, blocks * width))
    return word_bytes(indices) + word_bytes(2 * count) + 8 * blocks


SPARSE = [
    feedback_case(
        "top_k_sgd",
        top_k(ratio=0.25),
        bytes=top_quarter,
        dtypes={"u32"},
        contraction=lambda d: quarter(d) / d,
        alien=LARGEST_OF_ALL,
    )._replace(
        make=cache(
            lambda axis_name="data", seed=0: jaxcomm.top_k_sgd(axis_name, ratio=0.25, seed=seed),
        )
    ),
    feedback_case(
        "top_k_bfloat16",
        top_k(ratio=0.25, value_dtype="bfloat16"),
        bytes=lambda size: word_bytes(index_bits(quarter(size), size)) + 2 * quarter(size),
        dtypes={"u16"},
        contraction=lambda d: quarter(d) / d * (1 - 2.0**-16),
        alien=LARGEST_OF_ALL,
    ),
    feedback_case(
        "top_k_blocks",
        top_k(k=1, block_size=4),
        # A quarter of the coordinates, one of each four: two bits each say which.
        bytes=lambda size: (
            word_bytes(min(-(-size // 4) * 2, 4 * -(-size // 4))) + 4 * -(-size // 4)
        ),
        dtypes={"u32"},
        contraction=lambda d: 1 / min(d, 4),
    ),
    feedback_case(
        "top_k_sampled",
        top_k(ratio=0.25, sample_ratio=0.5),
        # One index more, which names no coordinate; no bitmap, since it may occur twice.
        bytes=lambda size: (
            word_bytes(index_bits_repeated(quarter(size), size + 1)) + 4 * quarter(size)
        ),
        dtypes={"u32"},
        contraction=lambda d: max(quarter(d) // 2, 1) / d,
        alien=LARGEST_OF_ALL,
    ),
    feedback_case(
        "coarse_top_k",
        coarse_top_k(k=2, block_size=4),
        bytes=two_of_four,
        dtypes={"u32"},
        contraction=lambda d: min(min(2, d) / min(4, d), 1 / min(2, d)),
    ),
    Case(
        "top_k_two_stage",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.two_stage_mean(
                error_feedback(top_k(ratio=0.25)), seed=seed, axis_name=axis_name
            )
        ),
        bytes=lambda sizes, n: (
            2 * (n - 1) * top_quarter(row_size(sum(sizes), n)) + all_reduce(4, n)
        ),
        dtypes=lambda n: {"u32"},
        unbiased=False,
        variance=None,
        random=False,
    ),
]
