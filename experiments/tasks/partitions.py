"""Splits of a training set among workers."""

from collections.abc import Iterator

import numpy as np

SKEW = 0.1


def split(labels: np.ndarray, workers: int, kind: str, seed: int) -> list[np.ndarray]:
    """The examples of each worker. Their numbers differ by at most 1.

    With `"iid"`, the examples are uniform. With `"skewed"`, each worker draws the shares of its
    labels from Dirichlet(0.1), as in Hsu et al., "Measuring the Effects of Non-Identical Data
    Distribution for Federated Visual Classification", 2019. The last workers take the labels that
    remain. All workers have the same weight in the mean model, so equal parts make the mean of
    their losses the loss over the training set.

    Args:
      labels: int[examples].
      workers: The number of parts.
      kind: `"iid"` or `"skewed"`.
      seed: The seed of the split.
    """
    rng = np.random.default_rng(seed)
    parts = np.array_split(rng.permutation(len(labels)), workers)
    if kind == "iid":
        return parts
    names = np.unique(labels)
    remaining = [[*rng.permutation(np.flatnonzero(labels == name))] for name in names]
    for worker in rng.permutation(workers):
        shares = rng.dirichlet(np.full(len(names), SKEW))
        for place in range(len(parts[worker])):
            left = np.array([bool(each) for each in remaining])
            # A worker whose labels are exhausted draws from all that remain.
            weights = shares * left if (shares * left).sum() > 0 else left.astype(float)
            label = rng.choice(len(names), p=weights / weights.sum())
            parts[worker][place] = remaining[label].pop()
    return parts


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
