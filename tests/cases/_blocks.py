"""Rows of coordinate descent: the same block of coordinates of all workers in a step."""

import numpy as np

from tests.cases._case import all_reduce, row

TWO = 2


def larger_half(sizes: list[int]) -> int:
    """Bytes of the larger of two blocks."""
    return 4 * -(-sum(sizes) // TWO)


BLOCKS = [
    row(
        "block_coordinate",
        bytes=lambda sizes, n: all_reduce(larger_half(sizes) + 4, n),
        dtypes="float32",
        random=False,
    ),
    row(
        "block_coordinate_random",
        bytes=lambda sizes, n: all_reduce(larger_half(sizes) + 4, n),
        dtypes="float32",
        contraction=lambda d: 1 / TWO,
        moment=lambda x: (1 - 1 / TWO) * float(np.sum(x**2)),
        common_draws=True,
    ),
    row(
        "block_coordinate_southwell",
        # And eight sums of each block, with the flag.
        bytes=lambda sizes, n: all_reduce(larger_half(sizes) + 4 * 8 * TWO + 4, n),
        dtypes="float32",
        common_draws=True,
    ),
    row(
        "block_coordinate_alone",
        bytes=lambda sizes, n: all_reduce(larger_half(sizes) + 4, n),
        dtypes="float32",
        random=False,
        # Each block is sent once in two steps, and not scaled.
        aim=lambda updates: updates.mean(axis=1) / TWO,
    ),
]
