"""Rows of aggregators that take turns, and of those that merge sparse payloads."""

from jaxcomm import Codec
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from tests.cases._case import LARGEST_OF_ALL, Sizes, all_reduce, row, word_bytes
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
    row(
        "warmup",
        bytes=lambda sizes, n: (n - 1) * (_half(sizes) + 4),
        random=False,
        alien=LARGEST_OF_ALL,
    ),
    row(
        "adaptive_ratio",
        # And three float32 to measure the error.
        bytes=lambda sizes, n: (n - 1) * (_half(sizes) + 4) + all_reduce(12, n),
        random=False,
        alien=LARGEST_OF_ALL,
    ),
    row(
        "gtop_k",
        feedback=False,
        # A payload a round of the tree; then the result, with a flag, to all.
        bytes=lambda sizes, n: (
            _rounds(n) * top_quarter(sum(sizes)) + all_reduce(top_quarter(sum(sizes)) + 4, n)
        ),
        random=False,
        alien=LARGEST_OF_ALL,
    ),
    row(
        "deep_gradient_compression",
        # The first stage of the warm-up sends a quarter; a sample may name an index twice.
        bytes=lambda sizes, n: (
            (n - 1)
            * (
                word_bytes(index_bits_repeated(quarter(sum(sizes)), sum(sizes) + 1))
                + 4 * quarter(sum(sizes))
                + 4
            )
        ),
        random=False,
        # The mean's norm is clipped at 2.
        aim=lambda updates: momentum_corrected(
            clipped(updates, 2.0 / updates.shape[1] ** 0.5), 0.1
        ),
        counted=32,
        alien=LARGEST_OF_ALL,
    ),
]
