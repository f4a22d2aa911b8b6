"""Edge sets with at most one edge per worker: matchings of a graph, and rounds of messages."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from jaxcomm.gossip._extras import is_graph
from jaxcomm.gossip._extras import networkx as nx
from jaxcomm.gossip._topologies import require_graph

Matching: TypeAlias = tuple[tuple[int, int], ...]

Round: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs `(sender, receiver)` as `lax.ppermute` takes them; no sender or receiver repeats."""


def matchings_of(
    graph: nx.Graph | Sequence[Sequence[Sequence[int]]],
) -> tuple[int, tuple[Matching, ...]]:
    """The number of workers, and the matchings: those of a connected graph, or as they are passed.

    Raises:
      ValueError: If the graph is directed or not connected, or as `require_matchings` does.
    """
    if not is_graph(graph):
        matchings = require_matchings(graph)
        return require_graph(nx.Graph(edge for each in matchings for edge in each)), matchings
    if graph.is_directed():
        raise ValueError("`graph` is directed, and matchings are not: use `graph.to_undirected()`.")
    return require_graph(graph), to_matchings(graph)


def require_matchings(matchings: Sequence[Sequence[Sequence[int]]]) -> tuple[Matching, ...]:
    """Checks the matchings and sorts the ends of each edge, `(lower, higher)`.

    Raises:
      ValueError: If a matching has two edges of one worker.
    """
    ordered = tuple(
        tuple(sorted((min(edge), max(edge)) for edge in matching)) for matching in matchings
    )
    for number, matching in enumerate(ordered):
        workers = [worker for edge in matching for worker in edge]
        if len(workers) != len(set(workers)):
            raise ValueError(f"Matching {number} has more than one edge at a worker: {matching}.")
    return ordered


def pair_average(workers: int, pairs: Matching) -> np.ndarray:
    """The matrix by which the two workers of each pair take their average."""
    weights = np.eye(workers)
    for i, j in pairs:
        weights[[i, i, j, j], [i, j, i, j]] = 0.5
    return weights


def to_matchings(graph: nx.Graph) -> tuple[Matching, ...]:
    """The smaller of two decompositions: at most one matching more than the largest degree."""
    return require_matchings(min(_greedy_matchings(graph), _edge_coloring(graph), key=len))


def _greedy_matchings(graph: nx.Graph) -> list[list[tuple[int, ...]]]:
    """Removes maximum matchings one by one; prefers workers with the most remaining edges."""
    remaining, matchings = nx.Graph(graph.edges), []
    while remaining.number_of_edges():
        for a, b in remaining.edges:
            remaining[a][b]["weight"] = remaining.degree[a] + remaining.degree[b]
        matching = sorted(nx.max_weight_matching(remaining, maxcardinality=True))
        matchings.append(matching)
        remaining.remove_edges_from(matching)
    return matchings


def _edge_coloring(graph: nx.Graph) -> list[list[tuple[int, ...]]]:
    """Colors the edges with at most one color more than the largest degree (Misra and Gries)."""
    colors = range(max((degree for _, degree in graph.degree), default=0) + 1)
    color_of: dict[frozenset[int], int] = {}

    def beside(node: int, color: int) -> int | None:
        """The neighbor at the other end of the node's edge of this color."""
        ends = (v for v in graph[node] if color_of.get(frozenset((node, v))) == color)
        return next(ends, None)

    def free(node: int) -> int:
        return next(color for color in colors if beside(node, color) is None)

    def is_fan(center: int, fan: list[int]) -> bool:
        """Whether the color of each edge is free at the preceding node of the fan."""
        return all(
            beside(before, color_of[frozenset((center, after))]) is None
            for before, after in itertools.pairwise(fan)
        )

    for center, first in sorted(graph.edges):
        fan = [first]
        grown = True
        while grown:
            following = (
                v
                for v in sorted(graph[center])
                if v not in fan
                and (color := color_of.get(frozenset((center, v)))) is not None
                and beside(fan[-1], color) is None
            )
            grown = (v := next(following, None)) is not None
            fan += [v] if v is not None else []
        of_center, of_last = free(center), free(fan[-1])
        # Swaps the two colors along the path from the center, on which they alternate.
        node, color, path = center, of_last, []
        while (end := beside(node, color)) is not None:
            path.append((frozenset((node, end)), color))
            node, color = end, of_center if color == of_last else of_last
        for edge, color in path:
            color_of[edge] = of_center if color == of_last else of_last
        last = next(
            i
            for i, v in enumerate(fan)
            if beside(v, of_last) is None and is_fan(center, fan[: i + 1])
        )
        for before, after in itertools.pairwise(fan[: last + 1]):
            color_of[frozenset((center, before))] = color_of[frozenset((center, after))]
        color_of[frozenset((center, fan[last]))] = of_last
    matchings = [
        [tuple(sorted(edge)) for edge, color in color_of.items() if color == wanted]
        for wanted in colors
    ]
    return [matching for matching in matchings if matching]


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
      >>> from jaxcomm.gossip._matchings import to_rounds
      >>> len(to_rounds(gossip.mixing_matrix(gossip.ring(7), "uniform")))
      2
      >>> to_rounds(gossip.mixing_matrix(gossip.ring(4), "uniform"))
      [((0, 1), (1, 2), (2, 3), (3, 0)), ((0, 3), (1, 0), (2, 1), (3, 2))]
    """
    workers = len(weights)
    edges = [(int(j), int(i)) for i, j in np.argwhere(weights) if i != j]
    symmetric = np.array_equal(weights != 0, weights.T != 0)
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
