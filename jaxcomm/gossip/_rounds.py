"""Message rounds between neighbors: in a round, a worker sends and receives at most one message."""

import collections
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

Round: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs `(sender, receiver)` as `lax.ppermute` takes them; no sender or receiver repeats."""


def _one_way(edges: Sequence[tuple[int, int]], workers: int) -> list[tuple[int, int]]:
    """One direction of each pair of edges (i, j), (j, i); as many leave a worker as reach it.

    Closed walks use each edge once. Workers of odd degree have one more edge, to an additional
    vertex; there the two numbers differ by 1.
    """
    neighbors: list[set[int]] = [set() for _ in range(workers + 1)]
    for worker, other in edges:
        neighbors[worker].add(other)
    for worker in range(workers):
        if len(neighbors[worker]) % 2:
            neighbors[worker].add(workers)
            neighbors[workers].add(worker)
    walked = []
    for start in range(workers):
        here = start
        while neighbors[here]:  # In a graph of even degrees, a walk ends where it began.
            there = min(neighbors[here])
            neighbors[here].remove(there)
            neighbors[there].remove(here)
            walked.append((here, there))
            here = there
    return [edge for edge in walked if workers not in edge]


def to_rounds(weights: np.ndarray) -> list[Round]:
    r"""Groups the off-diagonal entries of mixing `weights`, [n, n], into the fewest rounds.

    Senders and receivers are the two sides of a bipartite graph. The edges of such a graph can be
    colored with as many colors as its largest degree (Kőnig). A ring of any size takes 2 rounds,
    and a one-peer graph takes 1.

    If each edge has its reverse and the largest degree is even, no two workers send to each other
    in one round: half of the rounds take one direction of each edge, the others are their reverses.
    Gloo, with which JAX sends between CPUs, holds a connection while it writes to it, so that two
    such messages would take turns.

    Args:
      weights: float64[n, n]. Worker i sends the share `weights[j, i]` to worker j.

    Returns:
      The rounds, each a tuple of pairs `(sender, receiver)`.

    Example:
      >>> from jaxcomm import gossip
      >>> len(gossip.to_rounds(gossip.mixing_matrix(gossip.ring(7), "uniform")))
      2
      >>> gossip.to_rounds(gossip.mixing_matrix(gossip.ring(4), "uniform"))
      [((0, 1), (1, 2), (2, 3), (3, 0)), ((0, 3), (1, 0), (2, 1), (3, 2))]
    """
    workers = len(weights)
    edges = [
        (sender, receiver)
        for receiver in range(workers)
        for sender in range(workers)
        if sender != receiver and weights[receiver, sender] != 0
    ]
    directed = set(edges)
    symmetric = all((receiver, sender) in directed for sender, receiver in edges)
    if not symmetric or _degree(edges) % 2:
        return _color(edges)
    one_way = _color(_one_way(edges, workers))
    return [*one_way, *(tuple(sorted((r, s) for s, r in pairs)) for pairs in one_way)]


def _degree(edges: Sequence[tuple[int, int]]) -> int:
    """The most messages that a worker sends, or receives."""
    ends = [collections.Counter(edge[side] for edge in edges) for side in (0, 1)]
    return max((most for end in ends for most in end.values()), default=0)


def _color(edges: Sequence[tuple[int, int]]) -> list[Round]:
    """The rounds of edges (sender, receiver), as many as their largest degree.

    An edge takes a color that is free at its sender. If that color is not free at its receiver, two
    colors are swapped along the alternating path from the receiver: this color and one that is free
    at the receiver.
    """
    degree = _degree(edges)
    workers = 1 + max((worker for edge in edges for worker in edge), default=-1)
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
