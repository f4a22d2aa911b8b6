"""Rows of methods for sparse updates: sketches of the union, and its exact alternatives."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

import jaxcomm
from jaxcomm.compression.sketches import count_sketch, s2_sketch
from jaxcomm.compression.sparsifiers import nonzero, nonzero_union
from tests.cases._case import (
    COMMON_NOISE,
    Case,
    Sizes,
    all_reduce,
    feedback_case,
    row_size,
    word_bytes,
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
    name: str, *, sketch_ratio: float, unbiased: bool, variance: bool, **options: Any
) -> Case:
    rows, bits = options.get("rows", 1), options.get("bits", 32)
    decode = options.get("decode", "mean")
    return Case(
        name,
        cache(
            lambda axis_name="data", seed=0: jaxcomm.s2_reducer(
                axis_name,
                density=1.0,
                sketch_ratio=sketch_ratio,
                granularity="element",
                scope="bucket",
                seed=seed,
                **options,
            )
        ),
        bytes=s2_bytes(bits // 8, sketch_ratio, rows),
        dtypes=lambda n: {"u32", "f32" if bits == 32 else "s8"},
        unbiased=unbiased,
        # For the mean: (K - 1) / c of its square, which is at most the mean of squares.
        variance=(lambda d, n: (d - 1) / (rows * math.ceil(sketch_ratio * d / rows)))
        if variance
        else None,
        # All coordinates may be in the same cell.
        resolution=(lambda n, d: d) if unbiased else None,
        compressor=s2_sketch(
            density=1.0, sketch_ratio=sketch_ratio, rows=rows, granularity="element"
        )
        if decode == "mean"
        else None,
        moment=(
            lambda x: (
                max(np.count_nonzero(x) - 1, 0)
                / (rows * math.ceil(sketch_ratio * x.size / rows))
                * float(np.sum(x**2))
            )
        )
        if decode == "mean"
        else None,
        common_coins=bits == 32,
        fitted=decode == "peel",
        alien="" if unbiased else COMMON_NOISE,
    )


SKETCHED = [
    s2_case("s2_reducer", sketch_ratio=1.0, unbiased=True, variance=True),
    s2_case(
        "s2_reducer_median",
        sketch_ratio=2.0,
        rows=3,
        decode="median",
        unbiased=False,
        variance=False,
    ),
    s2_case(
        "s2_reducer_peel", sketch_ratio=1.5, rows=3, decode="peel", unbiased=True, variance=True
    ),
    s2_case(
        "s2_reducer_8_bits",
        sketch_ratio=1.5,
        rows=3,
        decode="peel",
        bits=8,
        overflow="drop",  # With few coordinates, some often do not peel.
        unbiased=False,
        variance=False,
    ),
    Case(
        "count_sketch",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.all_reduce_mean(
                count_sketch(sketch_ratio=0.5, hashing="elements"), seed=seed, axis_name=axis_name
            )
        ),
        bytes=lambda sizes, n: all_reduce(4 * math.ceil(sum(sizes) / 2) + 4, n),
        dtypes=lambda n: {"f32"},
        unbiased=True,
        variance=lambda d, n: (d - 1) / math.ceil(d / 2),
        resolution=lambda n, d: d,
        spreads=True,
        compressor=count_sketch(sketch_ratio=0.5, hashing="elements"),
        moment=lambda x: (x.size - 1) / math.ceil(x.size / 2) * float(np.sum(x**2)),
        common_coins=True,
    ),
    Case(
        "nonzero_union",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.all_reduce_mean(
                nonzero_union(density=1.0, granularity="element"), seed=seed, axis_name=axis_name
            )
        ),
        bytes=lambda sizes, n: agreed_bitmap(sum(sizes), n) + all_reduce(4 * sum(sizes) + 4, n),
        dtypes=lambda n: {"f32", "u32"},
        unbiased=True,
        variance=lambda d, n: 0,
        resolution=lambda n, d: 0,
        random=False,
        codec=nonzero_union(density=1.0, granularity="element"),
        common_coins=True,
    ),
    feedback_case(
        "nonzero",
        nonzero(density=0.5, granularity="element", overflow="drop"),
        bytes=lambda size: (
            word_bytes(index_bits_repeated(math.ceil(size / 2), size + 1)) + 4 * math.ceil(size / 2)
        ),
        dtypes={"u32"},
        contraction=lambda size: 0.5,
    ),
]
