"""A training set that workers hold parts of."""

from collections.abc import Iterator

import numpy as np

from experiments.errors import ExperimentError

SKEW = 0.1
_ATTEMPTS = 1000


def split(labels: np.ndarray, workers: int, kind: str, seed: int, least: int) -> list[np.ndarray]:
    """The examples of each worker: alike, or with labels skewed by a Dirichlet distribution.

    Args:
      labels: int[examples].
      workers: How many parts.
      kind: `"iid"` or `"skewed"`: of each label, workers hold Dirichlet(0.1) distributed parts.
      seed: Decides the split.
      least: A split in which a worker has fewer examples is drawn anew.
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
        whole = [np.concatenate(part) for part in parts]
        if min(map(len, whole)) >= least:
            return whole
    raise ExperimentError(f"No split into {workers} parts of at least {least} examples was found.")


def orders(parts: list[np.ndarray], size: int, seed: int) -> Iterator[np.ndarray]:
    """Examples of each step, those of all workers one after the other, without end.

    A worker goes through its own part in a new order again and again.
    """
    rng = np.random.default_rng(seed)
    waiting = [np.empty(0, np.int64) for _ in parts]
    while True:
        chosen = []
        for worker, part in enumerate(parts):
            while len(waiting[worker]) < size:
                waiting[worker] = np.concatenate([waiting[worker], rng.permutation(part)])
            chosen.append(waiting[worker][:size])
            waiting[worker] = waiting[worker][size:]
        yield np.concatenate(chosen)
