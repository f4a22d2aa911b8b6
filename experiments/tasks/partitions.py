"""Splits of a training set among workers."""

from collections.abc import Iterator

import numpy as np

from experiments.cli.errors import ExperimentError

SKEW = 0.1
_ATTEMPTS = 1000


def split(labels: np.ndarray, workers: int, kind: str, seed: int, least: int) -> list[np.ndarray]:
    """The examples of each worker, uniform or with skewed labels.

    Args:
      labels: int[examples].
      workers: The number of parts.
      kind: `"iid"`, or `"skewed"`: the shares of each label are drawn from Dirichlet(0.1).
      seed: The seed of the split.
      least: The minimum of examples per worker; a split with fewer is drawn again.

    Raises:
      ExperimentError: If no such split is found.
    """
    rng = np.random.default_rng(seed)
    if kind == "iid":
        return np.array_split(rng.permutation(len(labels)), workers)
    for _ in range(_ATTEMPTS):
        parts: list[list[np.ndarray]] = [[] for _ in range(workers)]
        for label in np.unique(labels):
            examples = rng.permutation(np.flatnonzero(labels == label))
            shares = rng.dirichlet(np.full(workers, SKEW))
            ends = np.round(np.cumsum(shares)[:-1] * len(examples)).astype(int)
            for part, piece in zip(parts, np.split(examples, ends), strict=True):
                part.append(piece)
        split_parts = [np.concatenate(part) for part in parts]
        if min(map(len, split_parts)) >= least:
            return split_parts
    raise ExperimentError(f"No split into {workers} parts of at least {least} examples was found.")


def orders(parts: list[np.ndarray], size: int, seed: int) -> Iterator[np.ndarray]:
    """Yields the examples of each step, worker by worker, without end.

    In each epoch, a worker iterates over its part in a new random order.
    """
    rng = np.random.default_rng(seed)
    waiting = [np.empty(0, np.int64) for _ in parts]
    while True:
        examples_of_step = []
        for worker, part in enumerate(parts):
            while len(waiting[worker]) < size:
                waiting[worker] = np.concatenate([waiting[worker], rng.permutation(part)])
            examples_of_step.append(waiting[worker][:size])
            waiting[worker] = waiting[worker][size:]
        yield np.concatenate(examples_of_step)
