"""Rows of variable-length codes, gathered."""

import math
from collections.abc import Callable
from functools import cache

import jaxcomm
from jaxcomm import Codec
from jaxcomm.compression.codes import elias, golomb_rice, rans
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k
from tests.cases._case import LARGEST_OF_ALL, Case, feedback_case, root


def _words(count: int, width: int, room: float, most: int, table: int = 0, state: int = 0) -> int:
    """Bytes of rows of at most `most` integers, of their headers, and of a table.

    All integers in a plain form of `width` bits, and `state` bits of each row; or, beyond 64 words,
    `room` bits per integer and 64 words, if that is less.
    """
    rows = -(-count // most)
    plain = rows * math.ceil((-(-count // rows) * width + state) / 32)
    words = plain
    if math.ceil(count * width / 32) > 64:
        words = min(math.ceil(room * count / 32) + 64, plain)
    return 4 * (words + -(-rows // 2) + table)


def _unbiased(
    name: str,
    codec: Codec,
    levels: int,
    /,
    *,
    bytes: Callable[[int], int],
    statistics: int = 1,
    peak: Callable[[int], float] = lambda d: 1.0,
) -> Case:
    """A row of a code of dithering's levels, with claims written out from its options."""
    return Case(
        name,
        cache(
            lambda axis_name="data", seed=0: jaxcomm.all_gather_mean(
                codec, seed=seed, axis_name=axis_name
            )
        ),
        # One bucket, its norm, and the flag for finite updates.
        bytes=lambda sizes, n: (n - 1) * (bytes(sum(sizes)) + 4 * statistics + 4),
        dtypes=lambda n: {"u32"},
        unbiased=True,
        variance=lambda d, n: min(d / levels**2, d**0.5 / levels) / n,
        resolution=lambda n, d: peak(d) / levels,
        codec=codec,
    )


CODED = [
    _unbiased(
        "elias",
        elias(dither(levels=7), room=3.5),
        7,
        bytes=lambda d: _words(d, 4, 3.5, 1024),
    ),
    _unbiased(
        "golomb_rice",
        golomb_rice(dither(levels=1, norm="l2"), room=1.5),
        1,
        bytes=lambda d: _words(d, 2, 1.5, 1024),
        statistics=3,
        peak=root,
    )._replace(counted=32),
    _unbiased(
        "rans",
        rans(dither(levels=7), room=3.5),
        7,
        bytes=lambda d: _words(d, 4, 3.5, 2048, table=8, state=32),
    ),
    feedback_case(
        "golomb_rice_top_k",
        golomb_rice(top_k(ratio=0.25), room=5.0),
        bytes=lambda d: (
            _words(max(round(d / 4), 1), max((d - 1).bit_length(), 1), 5.0, 1024)
            + 4 * max(round(d / 4), 1)
        ),
        dtypes={"u32"},
        contraction=lambda d: max(round(d / 4), 1) / d,
        alien=LARGEST_OF_ALL,
    ),
]
