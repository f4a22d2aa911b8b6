"""Rows of coordinate descent: the same block of coordinates of all workers in a step."""

from functools import cache

import numpy as np

import jaxcomm
from jaxcomm import Codec
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import block_coordinate
from jaxcomm.compression.sparsifiers._block_coordinate import Order
from tests.cases._case import Case, all_reduce

TWO = 2


def larger_half(sizes: list[int]) -> int:
    """Bytes of the larger of two blocks."""
    return 4 * -(-sum(sizes) // TWO)


def _in_turns(order: Order) -> Codec:
    return error_feedback(block_coordinate(TWO, order))


CYCLIC, RANDOM, SOUTHWELL = map(_in_turns, ("cyclic", "random", "gauss_southwell"))
ALONE = block_coordinate(TWO)

BLOCKS = [
    Case(
        "block_coordinate",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.all_reduce_mean(
                CYCLIC, seed=seed, axis_name=axis_name
            )
        ),
        bytes=lambda sizes, n: all_reduce(larger_half(sizes) + 4, n),
        dtypes=lambda n: {"f32"},
        unbiased=False,
        variance=None,
        random=False,
        codec=CYCLIC,
        feedback=True,
    ),
    Case(
        "block_coordinate_random",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.all_reduce_mean(
                RANDOM, seed=seed, axis_name=axis_name
            )
        ),
        bytes=lambda sizes, n: all_reduce(larger_half(sizes) + 4, n),
        dtypes=lambda n: {"f32"},
        unbiased=False,
        variance=None,
        codec=RANDOM,
        compressor=block_coordinate(TWO, "random"),
        contraction=lambda d: 1 / TWO,
        moment=lambda x: (1 - 1 / TWO) * float(np.sum(x**2)),
        feedback=True,
        common_coins=True,
    ),
    Case(
        "block_coordinate_southwell",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.all_reduce_mean(
                SOUTHWELL, seed=seed, axis_name=axis_name
            )
        ),
        # And eight sums of each block, with the flag.
        bytes=lambda sizes, n: all_reduce(larger_half(sizes) + 4 * 8 * TWO + 4, n),
        dtypes=lambda n: {"f32"},
        unbiased=False,
        variance=None,
        codec=SOUTHWELL,
        feedback=True,
        common_coins=True,
    ),
    Case(
        "block_coordinate_alone",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.all_reduce_mean(
                ALONE, seed=seed, axis_name=axis_name
            )
        ),
        bytes=lambda sizes, n: all_reduce(larger_half(sizes) + 4, n),
        dtypes=lambda n: {"f32"},
        unbiased=False,
        variance=None,
        random=False,
        codec=ALONE,
        # Each block is sent once in two steps, and not scaled.
        aim=lambda updates: updates.mean(axis=1) / TWO,
    ),
]
