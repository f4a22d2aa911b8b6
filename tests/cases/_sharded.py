"""Rows of `sharded_server`, whose inner optimizer is the identity, so that its update is a mean."""

from tests.cases._case import LARGEST_OF_ALL, Sizes, row, row_size, twice, zero
from tests.cases._sparse import top_quarter


def _slices(sizes: Sizes, workers: int) -> int:
    """The coordinates of one worker: each leaf is padded to equal slices."""
    return sum(row_size(size, workers) for size in sizes)


# A flag travels with each payload.
SHARDED = [
    row(
        "sharded_server",
        bytes=lambda sizes, n: 2 * (n - 1) * (4 * _slices(sizes, n) + 4),
        variance=zero,
        resolution=zero,
        random=False,
        staged=False,
    ),
    row(
        "sharded_server_8_bits",
        bytes=lambda sizes, n: 2 * (n - 1) * (_slices(sizes, n) + 4 + 4),
        dtypes="uint8",
        variance=lambda d, n: twice(min(row_size(d, n) / 127**2, row_size(d, n) ** 0.5 / 127), n),
        resolution=lambda n, d: 1 / 127 + (1 + 1 / 127) / 127,
        staged=False,
    ),
    row(
        "sharded_server_top_k",
        bytes=lambda sizes, n: 2 * (n - 1) * (top_quarter(_slices(sizes, n)) + 4),
        random=False,
        staged=False,
        alien=LARGEST_OF_ALL,
    ),
    row(
        "compressed_memory",
        bytes=lambda sizes, n: (n - 1) * (top_quarter(sum(sizes)) + 4),
        random=False,
        staged=False,
        alien=LARGEST_OF_ALL,
    ),
]
