"""Rows of descent along random directions. Given gradients, they project these on directions."""

from tests.cases._case import all_reduce, row

DIRECTIONS = 256
LARGEST = 5.5  # Of the Gaussian numbers from 23 bits.

ZEROTH_ORDER = [
    row(
        "zeroth_order",
        bytes=lambda sizes, n: all_reduce(4 * DIRECTIONS, n),
        dtypes="float32",
        # E|u <u, x>|^2 = d |x|^2 for signs, of the mean alone: all workers have the same u.
        variance=lambda d, n: (d - 1) / DIRECTIONS,
        resolution=lambda n, d: d - 1,
        common_draws=True,
        spreads=True,
    ),
    row(
        "zeroth_order_gaussian",
        bytes=lambda sizes, n: all_reduce(4 * DIRECTIONS, n),
        dtypes="float32",
        # E|u <u, x>|^2 = (d + 2) |x|^2 for normal numbers.
        variance=lambda d, n: (d + 1) / DIRECTIONS,
        resolution=lambda n, d: LARGEST**2 * d + 1,
        counted=16,  # Each takes long.
        common_draws=True,
        spreads=True,
    ),
]
