"""Rows of methods for sparse updates: sketches of the union, and its exact alternatives."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.cases._case import (
    COMMON_NOISE,
    Case,
    Sizes,
    all_reduce,
    feedback_row,
    row,
    row_size,
    word_bytes,
    zero,
)
from tests.cases._sparse import index_bits_repeated


def agreed_bitmap(size: int, n: int) -> float:
    """Bytes of the OR of these bits: an exchange of rows of words, and a gather."""
    return 2 * (n - 1) * 4 * row_size(-(-size // 32), n) if size else 0


def s2_bytes(cell_bytes: int, ratio: float, rows: int) -> Callable[[Sizes, int], float]:
    """Of density 1, one unit, one bit a coordinate: bitmap, table, flag, and the norm of codes."""

    def of(sizes: Sizes, n: int) -> float:
        size = sum(sizes)
        cells = rows * math.ceil(ratio * size / rows)
        statistics = 4 if cell_bytes == 4 else 8
        return agreed_bitmap(size, n) + all_reduce(cell_bytes * cells + statistics, n)

    return of


def s2_case(
    name: str,
    ratio: float,
    rows: int = 1,
    cell_bytes: int = 4,
    *,
    exact: bool = True,
    **claims: Any,
) -> Case:
    """A row of a table of `ratio` cells per coordinate; `exact` means on average."""
    unbiased = {
        # For the mean: (K - 1) / c of its square, which is at most the mean of squares.
        "variance": lambda d, n: (d - 1) / (rows * math.ceil(ratio * d / rows)),
        # All coordinates may be in the same cell.
        "resolution": lambda n, d: d,
    }
    return row(
        name,
        bytes=s2_bytes(cell_bytes, ratio, rows),
        dtypes=lambda n: {"uint32", "float32" if cell_bytes == 4 else "int8"},
        with_codec=False,
        common_draws=cell_bytes == 4,
        **(unbiased if exact else {"alien": COMMON_NOISE}),
        **claims,
    )


SKETCHED = [
    s2_case(
        "s2_reducer",
        1.0,
        moment=lambda x: max(np.count_nonzero(x) - 1, 0) / x.size * float(np.sum(x**2)),
    ),
    s2_case("s2_reducer_median", 2.0, 3, exact=False),
    s2_case("s2_reducer_peel", 1.5, 3, fitted=True),
    # With few coordinates, some often do not peel.
    s2_case("s2_reducer_8_bits", 1.5, 3, 1, exact=False, fitted=True),
    row(
        "count_sketch",
        bytes=lambda sizes, n: all_reduce(4 * math.ceil(sum(sizes) / 2) + 4, n),
        dtypes="float32",
        variance=lambda d, n: (d - 1) / math.ceil(d / 2),
        resolution=lambda n, d: d,
        with_codec=False,
        spreads=True,
        moment=lambda x: (x.size - 1) / math.ceil(x.size / 2) * float(np.sum(x**2)),
        common_draws=True,
    ),
    row(
        "nonzero_union",
        bytes=lambda sizes, n: agreed_bitmap(sum(sizes), n) + all_reduce(4 * sum(sizes) + 4, n),
        dtypes=lambda n: {"float32", "uint32"},
        variance=zero,
        resolution=zero,
        random=False,
        common_draws=True,
    ),
    feedback_row(
        "nonzero",
        bytes=lambda size: (
            word_bytes(index_bits_repeated(math.ceil(size / 2), size + 1)) + 4 * math.ceil(size / 2)
        ),
        contraction=lambda size: 0.5,
    ),
]
