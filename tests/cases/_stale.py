"""Rows of old gradients, and of uploads that are skipped."""

from functools import cache

import jaxcomm
from jaxcomm.compression import blockwise
from jaxcomm.compression.quantizers import scaled_cast
from tests.cases._case import Case, all_reduce

BLOCK = 16
STALE = [
    Case(
        "delayed",
        cache(lambda axis_name="data", seed=0: jaxcomm.delayed(jaxcomm.mean(axis_name))),
        # And a flag.
        bytes=lambda sizes, n: all_reduce(4 * sum(sizes) + 4, n),
        dtypes=lambda n: {"f32"},
        unbiased=False,
        variance=None,
        random=False,
        staged=False,
    ),
    Case(
        "lazy",
        cache(lambda axis_name="data", seed=0: jaxcomm.lazy(axis_name=axis_name)),
        # And two flags, before the sum.
        bytes=lambda sizes, n: all_reduce(4 * sum(sizes) + 8, n),
        dtypes=lambda n: {"f32"},
        unbiased=True,
        variance=lambda d, n: 0,
        resolution=lambda n, d: 0,
        random=False,
        staged=False,
    ),
    Case(
        "laq",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.lazy(
                blockwise(scaled_cast("float8_e4m3fn"), BLOCK),
                threshold=0.8,
                max_skip=4,
                axis_name=axis_name,
            )
        ),
        # Blocks of codes with one norm each, and the flag of the gather; before it, two flags.
        bytes=lambda sizes, n: (
            (n - 1) * ((BLOCK + 4) * -(-sum(sizes) // BLOCK) + 4) + all_reduce(8, n)
        ),
        dtypes=lambda n: {"u8"},
        unbiased=False,
        variance=None,
        random=False,
        staged=False,
    ),
]
