"""Rows of old gradients, of workers that are dropped, and of uploads that are skipped."""

from functools import cache
from typing import Any

import optax

import jaxcomm
from jaxcomm import _axis
from jaxcomm.aggregation._stages import averages_over
from jaxcomm.compression import blockwise
from jaxcomm.compression.quantizers import dither
from jaxcomm.synchronization import exponential
from tests.cases._case import Case, all_reduce
from tests.mutants import FORGETFUL

BLOCK = 16
FIRST_AGAIN = ((FORGETFUL, "Each step is then a first one, in which all workers upload."),)


def one_spare(axis_name: Any, seed: int) -> optax.GradientTransformationExtraArgs:
    """One backup worker, and none if there is only one worker, which must count."""

    def of_size() -> optax.GradientTransformationExtraArgs:
        spares = min(1, _axis.size(axis_name) - 1)
        times = exponential(1.0).sample
        return jaxcomm.backup(jaxcomm.mean(axis_name), spares, times=times, seed=seed)

    @averages_over(axis_name)
    def update(*args: Any, **extra_args: Any) -> Any:
        return of_size().update(*args, **extra_args)

    def init(params: Any) -> Any:
        _axis.require_bound(axis_name)
        return of_size().init(params)

    return optax.GradientTransformationExtraArgs(init, update)


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


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
        "backup",
        cache(lambda axis_name="data", seed=0: one_spare(axis_name, seed)),
        # And the sum of weights.
        bytes=lambda sizes, n: all_reduce(4 * sum(sizes) + 4, n),
        dtypes=lambda n: {"f32"},
        unbiased=False,
        variance=None,
        random=False,
        nonfinite="coordinate",
    ),
    Case(
        "lazy",
        cache(lambda axis_name="data", seed=0: jaxcomm.lazy(axis_name)),
        # And two flags, before the sum.
        bytes=lambda sizes, n: all_reduce(4 * sum(sizes) + 8, n),
        dtypes=lambda n: {"f32"},
        unbiased=True,
        variance=lambda d, n: 0,
        resolution=lambda n, d: 0,
        random=False,
        exempt=FIRST_AGAIN,
        staged=False,
    ),
    Case(
        "laq",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.lazy(
                axis_name, blockwise(dither(bits=8), BLOCK), threshold=0.8, seed=seed
            )
        ),
        # Norms of blocks, two flags before them, and one with them.
        bytes=lambda sizes, n: all_reduce(
            BLOCK * _blocks(sum(sizes)) + 4 * _blocks(sum(sizes)) + 12, n
        ),
        dtypes=lambda n: {"s8"},
        unbiased=False,
        variance=None,
        exempt=FIRST_AGAIN,
        staged=False,
    ),
]
