"""Rows of sparsifiers."""

import math

from tests.cases._case import LARGEST_OF_ALL, all_reduce, feedback_row, row, row_size, word_bytes


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
    feedback_row(
        "top_k_sgd",
        bytes=top_quarter,
        contraction=lambda d: quarter(d) / d,
        alien=LARGEST_OF_ALL,
    ),
    feedback_row(
        "top_k_bfloat16",
        bytes=lambda size: word_bytes(index_bits(quarter(size), size)) + 2 * quarter(size),
        dtypes="uint16",
        contraction=lambda d: quarter(d) / d * (1 - 2.0**-16),
        alien=LARGEST_OF_ALL,
    ),
    feedback_row(
        "top_k_blocks",
        # A quarter of the coordinates, one of each four: two bits each say which.
        bytes=lambda size: (
            word_bytes(min(-(-size // 4) * 2, 4 * -(-size // 4))) + 4 * -(-size // 4)
        ),
        contraction=lambda d: 1 / min(d, 4),
    ),
    feedback_row(
        "top_k_sampled",
        # One index more, which names no coordinate; no bitmap, since it may occur twice.
        bytes=lambda size: (
            word_bytes(index_bits_repeated(quarter(size), size + 1)) + 4 * quarter(size)
        ),
        contraction=lambda d: max(quarter(d) // 2, 1) / d,
        alien=LARGEST_OF_ALL,
    ),
    feedback_row(
        "coarse_top_k",
        bytes=two_of_four,
        contraction=lambda d: min(min(2, d) / min(4, d), 1 / min(2, d)),
    ),
    row(
        "top_k_two_stage",
        bytes=lambda sizes, n: (
            2 * (n - 1) * top_quarter(row_size(sum(sizes), n)) + all_reduce(4, n)
        ),
        random=False,
    ),
]
