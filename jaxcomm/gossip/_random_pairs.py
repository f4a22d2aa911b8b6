"""Random pairs: in each step, every worker meets one other."""

import numpy as np

from jaxcomm.gossip._mixing_plan import Mixing
from jaxcomm.gossip._to_mixing import randomized


def _pairings(workers: int) -> list[list[tuple[int, int]]]:
    """The rounds of a tournament (the circle method): each pair is in exactly one of them."""
    places = [*range(workers), *([-1] if workers % 2 else [])]  # -1 has no partner.
    found = []
    for _ in range(len(places) - 1):
        pairs = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]), strict=True)
        found.append([pair for pair in pairs if min(pair) >= 0])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def random_pairs(workers: int) -> Mixing:
    r"""Draws pairs of workers per step, the same on all workers; a pair takes its average.

    The pairs are a round of a tournament of all workers, drawn from n - 1 rounds (n, if n is odd).
    So any two workers meet with the same probability. If n is odd, one worker has no partner. A
    worker sends at most one message per step. The program has a branch per round.

    Args:
      workers: n, at least 1.

    Returns:
      A :class:`Mixing`, for any method that takes symmetric weights.

    Raises:
      ValueError: If `workers` is not a positive int.

    Example:
      >>> from jaxcomm import gossip
      >>> mixing = gossip.random_pairs(8)
      >>> len(mixing.matrices), mixing.degree
      (7, 1)
    """
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ValueError(f"`workers` must be a Python int of at least 1, got {workers!r}.")

    def matrix(pairs: list[tuple[int, int]]) -> np.ndarray:
        weights = np.eye(workers)
        for i, j in pairs:
            weights[[i, i, j, j], [i, j, i, j]] = 0.5
        return weights

    return randomized([matrix(pairs) for pairs in _pairings(workers)] or [np.eye(workers)])
