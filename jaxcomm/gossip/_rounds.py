"""Messages between neighbours as rounds, in each of which a worker sends one and receives one."""

from typing import TypeAlias

import numpy as np

Round: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs `(sender, receiver)`, neither of them twice, as `lax.ppermute` takes them."""


def to_rounds(weights: np.ndarray) -> list[Round]:
    r"""The off-diagonal entries of mixing `weights`, [n, n], as rounds, as few as there can be.

    Senders and receivers are the two sides of a bipartite graph, whose edges can be coloured with
    as many colours as its largest degree (Kőnig): a ring takes 2 rounds, of any length, and a
    one-peer graph 1. An edge takes a colour that is free at its sender; where that is not free at
    its receiver, the path of the two colours in question that begins there is recoloured.

    Args:
      weights: float64[n, n], of which worker i gives j the share `weights[j, i]`.

    Returns:
      The rounds, each of pairs of a sender and a receiver.

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
    # to_partner[side][worker][colour]: at the other end of its edge of that colour.
    to_partner: list[list[dict[int, int]]] = [[{} for _ in range(workers)] for _ in range(2)]

    def free(side: int, worker: int) -> int:
        return next(c for c in range(degree) if c not in to_partner[side][worker])

    for sender, receiver in edges:
        at_sender, at_receiver = free(0, sender), free(1, receiver)
        if at_sender not in to_partner[1][receiver]:
            at_receiver = at_sender
        # Swaps the two colours along the path from the receiver, which never comes to the sender.
        side, worker, colour, other = 1, receiver, at_sender, at_receiver
        moved = []
        while colour in to_partner[side][worker]:
            partner = to_partner[side][worker][colour]
            moved.append((side, worker, partner, colour, other))
            side, worker, colour, other = 1 - side, partner, other, colour
        for side, worker, partner, colour, _ in moved:
            del to_partner[side][worker][colour]
            del to_partner[1 - side][partner][colour]
        for side, worker, partner, _, other in moved:
            to_partner[side][worker][other] = partner
            to_partner[1 - side][partner][other] = worker
        to_partner[0][sender][at_sender] = receiver
        to_partner[1][receiver][at_sender] = sender
    return [
        tuple((s, to_partner[0][s][c]) for s in range(workers) if c in to_partner[0][s])
        for c in range(degree)
    ]
