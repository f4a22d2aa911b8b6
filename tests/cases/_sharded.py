"""Rows of `sharded_server`, whose inner optimizer is the identity, so that its update is a mean."""

from functools import cache

import optax

import jaxcomm
from jaxcomm import Codec
from jaxcomm.compression import compressed_memory
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k
from tests.cases._case import LARGEST_OF_ALL, Case, Sizes, row_size, twice
from tests.cases._sparse import top_quarter


def _slices(sizes: Sizes, workers: int) -> int:
    """The coordinates of one worker: each leaf is padded to equal slices."""
    return sum(row_size(size, workers) for size in sizes)


def _both_ends(codec: Codec | None):
    return cache(
        lambda axis_name="data", seed=0: jaxcomm.sharded_server(
            optax.identity(), codec, codec, axis_name=axis_name, seed=seed
        )
    )


SHORT_MEMORY = compressed_memory(error_feedback(top_k(ratio=0.25)), dither(bits=8))


@cache
def _short_memory(axis_name="data", seed=0):
    return jaxcomm.all_gather_mean(SHORT_MEMORY, seed=seed, axis_name=axis_name)


# A flag travels with each payload.
SHARDED = [
    Case(
        "sharded_server",
        _both_ends(None),
        bytes=lambda sizes, n: 2 * (n - 1) * (4 * _slices(sizes, n) + 4),
        dtypes=lambda n: {"u32"},
        unbiased=True,
        variance=lambda d, n: 0,
        resolution=lambda n, d: 0,
        random=False,
        staged=False,
    ),
    Case(
        "sharded_server_8_bits",
        _both_ends(dither(bits=8)),
        bytes=lambda sizes, n: 2 * (n - 1) * (_slices(sizes, n) + 4 + 4),
        dtypes=lambda n: {"u8"},
        unbiased=True,
        variance=lambda d, n: twice(min(row_size(d, n) / 127**2, row_size(d, n) ** 0.5 / 127), n),
        resolution=lambda n, d: 1 / 127 + (1 + 1 / 127) / 127,
        staged=False,
    ),
    Case(
        "sharded_server_top_k",
        _both_ends(error_feedback(top_k(ratio=0.25))),
        bytes=lambda sizes, n: 2 * (n - 1) * (top_quarter(_slices(sizes, n)) + 4),
        dtypes=lambda n: {"u32"},
        unbiased=False,
        variance=None,
        random=False,
        staged=False,
        alien=LARGEST_OF_ALL,
    ),
    Case(
        "compressed_memory",
        _short_memory,
        bytes=lambda sizes, n: (n - 1) * (top_quarter(sum(sizes)) + 4),
        dtypes=lambda n: {"u32"},
        unbiased=False,
        variance=None,
        random=False,
        codec=SHORT_MEMORY,
        staged=False,
        alien=LARGEST_OF_ALL,
    ),
]
