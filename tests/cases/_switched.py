"""Rows of aggregators that take turns, and of those that merge sparse payloads."""

from functools import cache

import jaxcomm
from jaxcomm import Codec
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from tests.cases._case import LARGEST_OF_ALL, Case, Sizes, all_reduce, word_bytes
from tests.cases._feedback import clipped, momentum_corrected
from tests.cases._sparse import index_bits, index_bits_repeated, quarter, top_quarter


def _top(ratio: float) -> Codec:
    return error_feedback(top_k(ratio=ratio))


def _half(sizes: Sizes) -> int:
    """Bytes of half of the coordinates, the heaviest of the stages below."""
    size = sum(sizes)
    count = max(round(size / 2), 1)
    return word_bytes(index_bits(count, size)) + 4 * count


def _rounds(workers: int) -> int:
    return (workers - 1).bit_length()


SWITCHED = [
    Case(
        "warmup",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.warmup(
                [
                    jaxcomm.all_gather_mean(_top(ratio), seed=seed, axis_name=axis_name)
                    for ratio in (0.5, 0.25, 0.125)
                ],
                every=1,
            )
        ),
        bytes=lambda sizes, n: (n - 1) * (_half(sizes) + 4),
        dtypes=lambda n: {"u32"},
        unbiased=False,
        variance=None,
        random=False,
        alien=LARGEST_OF_ALL,
    ),
    Case(
        "adaptive_ratio",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.adaptive_ratio(
                _top,
                [0.125, 0.25, 0.5],
                target_error=0.3,
                patience=2,
                seed=seed,
                axis_name=axis_name,
            )
        ),
        # And three float32 to measure the error.
        bytes=lambda sizes, n: (n - 1) * (_half(sizes) + 4) + all_reduce(12, n),
        dtypes=lambda n: {"u32"},
        unbiased=False,
        variance=None,
        random=False,
        alien=LARGEST_OF_ALL,
    ),
    Case(
        "gtop_k",
        cache(lambda axis_name="data", seed=0: jaxcomm.gtop_k(axis_name, ratio=0.25)),
        # A payload a round of the tree; then the result, with a flag, to all.
        bytes=lambda sizes, n: (
            _rounds(n) * top_quarter(sum(sizes)) + all_reduce(top_quarter(sum(sizes)) + 4, n)
        ),
        dtypes=lambda n: {"u32"},
        unbiased=False,
        variance=None,
        random=False,
        codec=error_feedback(top_k(ratio=0.25)),
        alien=LARGEST_OF_ALL,
    ),
    Case(
        "deep_gradient_compression",
        cache(
            lambda axis_name="data", seed=0: jaxcomm.deep_gradient_compression(
                axis_name, ratio=0.1, max_norm=2.0, sample_ratio=0.5, warmup_every=2
            )
        ),
        # The first stage of the warm-up sends a quarter; a sample may name an index twice.
        bytes=lambda sizes, n: (
            (n - 1)
            * (
                word_bytes(index_bits_repeated(quarter(sum(sizes)), sum(sizes) + 1))
                + 4 * quarter(sum(sizes))
                + 4
            )
        ),
        dtypes=lambda n: {"u32"},
        unbiased=False,
        variance=None,
        random=False,
        # The mean's norm is clipped at 2.
        aim=lambda updates: momentum_corrected(
            clipped(updates, 2.0 / updates.shape[1] ** 0.5), 0.1
        ),
        counted=32,
        alien=LARGEST_OF_ALL,
    ),
]
