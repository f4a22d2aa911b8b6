"""Rows of old gradients, and of uploads that are skipped."""

from tests.cases._case import all_reduce, row, zero

BLOCK = 16
STALE = [
    row(
        "delayed",
        # And a flag.
        bytes=lambda sizes, n: all_reduce(4 * sum(sizes) + 4, n),
        dtypes="float32",
        random=False,
        staged=False,
    ),
    row(
        "lazy",
        # And two flags, before the sum.
        bytes=lambda sizes, n: all_reduce(4 * sum(sizes) + 8, n),
        dtypes="float32",
        variance=zero,
        resolution=zero,
        random=False,
        staged=False,
    ),
    row(
        "lazy_float8",
        # Blocks of codes with one norm each, and the flag of the gather; before it, two flags.
        bytes=lambda sizes, n: (
            (n - 1) * ((BLOCK + 4) * -(-sum(sizes) // BLOCK) + 4) + all_reduce(8, n)
        ),
        dtypes="uint8",
        random=False,
        staged=False,
    ),
]
