"""Message rounds between neighbors: in a round, a worker sends and receives at most one message."""

from typing import TypeAlias

import numpy as np

Round: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs `(sender, receiver)` as `lax.ppermute` takes them; no sender or receiver repeats."""


def to_rounds(weights: np.ndarray) -> list[Round]:
    r"""Groups the off-diagonal entries of mixing `weights`, [n, n], into the fewest rounds.

    Senders and receivers are the two sides of a bipartite graph. The edges of such a graph can be
    colored with as many colors as its largest degree (Kőnig). A ring of any size takes 2 rounds,
    and a one-peer graph takes 1. An edge takes a color that is free at its sender. If that color is
    not free at its receiver, two colors are swapped along the alternating path from the receiver:
    this color and one that is free at the receiver.

    Args:
      weights: float64[n, n]. Worker i sends the share `weights[j, i]` to worker j.

    Returns:
      The rounds, each a tuple of pairs `(sender, receiver)`.

    Example:
      >>> from jaxcomm import gossip
      >>> len(gossip.to_rounds(gossip.mixing_matrix(gossip.ring(7), "uniform")))
      2
    """
    workers = len(weights)
    edges = [
        (sender, receiver)
        for receiver in range(workers)
        for sender in range(workers)
        if sender != receiver and weights[receiver, sender] != 0
    ]
    degree = max(
        (
            sum(edge[side] == worker for edge in edges)
            for worker in range(workers)
            for side in (0, 1)
        ),
        default=0,
    )
    # to_partner[side][worker][color]: the other end of the worker's edge of that color.
    to_partner: list[list[dict[int, int]]] = [[{} for _ in range(workers)] for _ in range(2)]

    def free(side: int, worker: int) -> int:
        return next(c for c in range(degree) if c not in to_partner[side][worker])

    for sender, receiver in edges:
        at_sender, at_receiver = free(0, sender), free(1, receiver)
        if at_sender not in to_partner[1][receiver]:
            at_receiver = at_sender
        # Swaps the two colors along the path from the receiver, which never reaches the sender.
        side, worker, color, other = 1, receiver, at_sender, at_receiver
        moved = []
        while color in to_partner[side][worker]:
            partner = to_partner[side][worker][color]
            moved.append((side, worker, partner, color, other))
            side, worker, color, other = 1 - side, partner, other, color
        for side, worker, partner, color, _ in moved:
            del to_partner[side][worker][color]
            del to_partner[1 - side][partner][color]
        for side, worker, partner, _, other in moved:
            to_partner[side][worker][other] = partner
            to_partner[1 - side][partner][other] = worker
        to_partner[0][sender][at_sender] = receiver
        to_partner[1][receiver][at_sender] = sender
    return [
        tuple((s, to_partner[0][s][c]) for s in range(workers) if c in to_partner[0][s])
        for c in range(degree)
    ]
