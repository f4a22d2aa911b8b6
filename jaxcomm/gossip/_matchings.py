"""Decompositions of a graph into matchings: edge sets in which each worker has at most one edge."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

from jaxcomm.gossip._extras import networkx as nx

Matching: TypeAlias = tuple[tuple[int, int], ...]


def require_matchings(matchings: Sequence[Sequence[Sequence[int]]]) -> tuple[Matching, ...]:
    """Checks the matchings and sorts the ends of each edge, `(lower, higher)`.

    Raises:
      ValueError: If a matching has two edges of one worker, or an edge occurs twice.
    """
    ordered = tuple(
        tuple(sorted((min(edge), max(edge)) for edge in matching)) for matching in matchings
    )
    for number, matching in enumerate(ordered):
        workers = [worker for edge in matching for worker in edge]
        if len(workers) != len(set(workers)):
            repeated = sorted({worker for worker in workers if workers.count(worker) > 1})
            raise ValueError(
                f"Matching {number} has more than one edge at the workers {repeated}, but a "
                "matching has at most one edge per worker."
            )
    edges = [edge for matching in ordered for edge in matching]
    if len(edges) != len(set(edges)):
        raise ValueError(
            "The matchings of the graph must be disjoint, but an edge is in more than one of them."
        )
    return ordered


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
