"""Rows of variable-length codes, gathered."""

import math
from collections.abc import Callable

from tests.cases._case import LARGEST_OF_ALL, Case, feedback_row, root, row


def _words(
    count: int, width: int, capacity: float, most: int, table: int = 0, state: int = 0
) -> int:
    """Bytes of rows of at most `most` integers, of their headers, and of a table.

    All integers in a plain form of `width` bits, and `state` bits of each row; or, beyond 64 words,
    `capacity` bits per integer and 64 words, if that is less.
    """
    rows = -(-count // most)
    plain = rows * math.ceil((-(-count // rows) * width + state) / 32)
    words = plain
    if math.ceil(count * width / 32) > 64:
        words = min(math.ceil(capacity * count / 32) + 64, plain)
    return 4 * (words + -(-rows // 2) + table)


def _unbiased(
    name: str,
    levels: int,
    /,
    *,
    bytes: Callable[[int], int],
    statistics: int = 1,
    peak: Callable[[int], float] = lambda d: 1.0,
) -> Case:
    """A row of a code of dithering's levels, with claims written out from its options."""
    return row(
        name,
        # One bucket, its norm, and the flag for finite updates.
        bytes=lambda sizes, n: (n - 1) * (bytes(sum(sizes)) + 4 * statistics + 4),
        variance=lambda d, n: min(d / levels**2, d**0.5 / levels) / n,
        resolution=lambda n, d: peak(d) / levels,
    )


CODED = [
    _unbiased(
        "elias",
        7,
        bytes=lambda d: _words(d, 4, 3.5, 1024),
    ),
    _unbiased(
        "golomb_rice",
        1,
        bytes=lambda d: _words(d, 2, 1.5, 1024),
        statistics=3,
        peak=root,
    )._replace(counted=32),
    _unbiased(
        "rans",
        7,
        bytes=lambda d: _words(d, 4, 3.5, 2048, table=8, state=32),
    ),
    feedback_row(
        "golomb_rice_top_k",
        bytes=lambda d: (
            _words(max(round(d / 4), 1), max((d - 1).bit_length(), 1), 5.0, 1024)
            + 4 * max(round(d / 4), 1)
        ),
        contraction=lambda d: max(round(d / 4), 1) / d,
        alien=LARGEST_OF_ALL,
    ),
]
