"""Rows of special exchanges of sparse updates: doubling, servers of rows, sums of sketches."""

import math

import numpy as np

from tests.cases._case import COMMON_NOISE, LARGEST_OF_ALL, all_reduce, row, word_bytes, zero
from tests.cases._feedback import momentum_corrected
from tests.cases._sparse import index_bits_repeated, quarter

LENGTHS = {3: 3, 10: 5, 1: 1}
"""The length of the first axis of a leaf of `tests.workers`, by the number of its coordinates."""


def all_there_is(size: int) -> int:
    """Bytes of coordinates, each with its index."""
    return word_bytes(index_bits_repeated(size, size + 1)) + 4 * size


def doubling_bytes(size: int, n: int) -> float:
    """One payload per round, a part of the last one to all workers, and the flag."""
    power = 2 ** math.floor(math.log2(n))
    rounds = math.log2(power) + (n > power)
    part = 4 * -(-all_there_is(size) // 4 // power)  # Of a message of words.
    return rounds * all_there_is(size) + (n - 1) * part + all_reduce(4, n)


def server_bytes(sizes: list[int], n: int) -> float:
    """Scalars are dense; of each other leaf, a part to each server, and the server's to all."""
    sparse, total = [size for size in sizes if size > 1], 0.0
    for size in sparse:
        length = LENGTHS.get(size, size)
        total += 2 * (n - 1) * all_there_is(-(-length // n) * (size // length))
    return total + all_reduce(4 * len([s for s in sizes if s == 1]) + 4 * bool(sparse), n)


def cells(size: int) -> int:
    """Bytes of a table of three rows and two cells per coordinate."""
    return 3 * math.ceil(2 * size / 3)


def fetched(updates: np.ndarray) -> np.ndarray:
    """The mean result of FetchSGD over several hashes."""
    return np.mean([_fetched(updates, seed) for seed in range(8)], axis=0)


def _fetched(updates: np.ndarray, seed: int) -> np.ndarray:
    """Rothchild et al.'s algorithm for a quarter of the coordinates, with hashes from NumPy."""
    rng, d = np.random.default_rng(seed), updates.shape[-1]
    places, signs = rng.integers(cells(d) // 3, size=(3, d)), rng.choice([-1, 1], (3, d))

    def table_of(x: np.ndarray) -> np.ndarray:
        table = np.zeros((3, cells(d) // 3))
        np.add.at(table, (np.arange(3)[:, None], places), signs * x)
        return table

    momentum, error, means = table_of(np.zeros(d)), table_of(np.zeros(d)), []
    for mean in updates.mean(axis=1):
        momentum = 0.9 * momentum + table_of(mean)
        error = error + momentum
        estimate = np.median(signs * np.take_along_axis(error, places, axis=1), axis=0)
        largest = np.argsort(-np.abs(estimate))[: quarter(d)]
        means.append(np.where(np.isin(np.arange(d), largest), estimate, 0))
        untouched = table_of(means[-1]) == 0
        momentum, error = momentum * untouched, error * untouched
    return np.stack(means)


def budgeted_bytes(size: int, n: int) -> float:
    """Worker 0 is slow; of each permutation, as every worker that takes part counts it."""
    owners = max(n - 1, 1)
    row = -(-size // owners)
    fast, slow = row + 4, word_bytes(2 * row) + 4
    sent = 0.0
    for turn in range(n):
        # In a turn, row k is sent by the worker that is k before it; to worker k + 1.
        senders = [((turn - k) % n, k + (n > 1)) for k in range(owners)]
        others = [sender for sender, owner in senders if sender != owner]
        sent += slow * (0 in others) + fast * any(others)
    mean = (n - 1) * (fast if n > 1 else row + 4)
    return sent + mean + all_reduce(4, n)


def budgeted_variance(d: int, n: int) -> float:
    """That of the slow worker's term, which has one level, bounds those of the others."""
    row = -(-d // max(n - 1, 1))
    omega, slow = min(row / 127**2, row**0.5 / 127), min(row, row**0.5)
    return ((1 + omega) * slow + n * omega) / n


def _first_stage(n: int) -> float:
    return (1 + (n - 1) / 127) / n


EXCHANGED = [
    row(
        "sparcml",
        bytes=lambda sizes, n: doubling_bytes(sum(sizes), n),
        variance=zero,
        resolution=zero,
        random=False,
        staged=False,
    ),
    row(
        "parallax",
        bytes=server_bytes,
        variance=zero,
        resolution=zero,
        random=False,
        nonfinite="coordinate",  # Leaves that are sent dense are not encoded.
        staged=False,
    ),
    row(
        "sketched_sgd",
        bytes=lambda sizes, n: all_reduce(
            4 * (cells(sum(sizes)) + min(4 * quarter(sum(sizes)), sum(sizes))) + 4, n
        ),
        dtypes="float32",
        common_draws=True,
        # All workers send the largest coordinates of the sum, as one worker with the mean would.
        aim=lambda updates: momentum_corrected(updates.mean(axis=1, keepdims=True), 0.25),
        alien=LARGEST_OF_ALL,
    ),
    row(
        "fetch_sgd",
        bytes=lambda sizes, n: all_reduce(4 * cells(sum(sizes)) + 4, n),
        dtypes="float32",
        common_draws=True,
        aim=fetched,
        # More is subtracted from a cell than was read: a value unlike the others is lost.
        shares=math.inf,
        alien=COMMON_NOISE,
    ),
    row(
        "budgeted_mean",
        bytes=lambda sizes, n: budgeted_bytes(sum(sizes), n),
        dtypes=lambda n: {"uint8", "uint32"},
        variance=budgeted_variance,
        resolution=lambda n, d: _first_stage(n) + (1 + _first_stage(n)) / 127,
        alien=COMMON_NOISE,
    ),
]
