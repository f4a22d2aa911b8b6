"""The edges of a graph as matchings: sets in which no worker has two edges."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

from jaxcomm.gossip._extras import networkx as nx

Matching: TypeAlias = tuple[tuple[int, int], ...]


def require_matchings(matchings: Sequence[Sequence[Sequence[int]]]) -> tuple[Matching, ...]:
    """The matchings with each edge in order, `(lower, higher)`.

    Raises:
      ValueError: If a worker has two edges in one, or an edge comes twice.
    """
    ordered = tuple(
        tuple(sorted((min(edge), max(edge)) for edge in matching)) for matching in matchings
    )
    for number, matching in enumerate(ordered):
        workers = [worker for edge in matching for worker in edge]
        if len(workers) != len(set(workers)):
            twice = sorted({worker for worker in workers if workers.count(worker) > 1})
            raise ValueError(f"Matching {number} has two edges of the workers {twice}.")
    edges = [edge for matching in ordered for edge in matching]
    if len(edges) != len(set(edges)):
        raise ValueError("An edge is in more than one of the matchings.")
    return ordered


def to_matchings(graph: nx.Graph) -> tuple[Matching, ...]:
    """As few matchings as are found, and at most one more than the largest degree."""
    return require_matchings(min(_peeled(graph), _coloured(graph), key=len))


def _peeled(graph: nx.Graph) -> list[list[tuple[int, ...]]]:
    """Largest matchings, one after the other, workers with most edges left first."""
    left, matchings = nx.Graph(graph.edges), []
    while left.number_of_edges():
        for a, b in left.edges:
            left[a][b]["weight"] = left.degree[a] + left.degree[b]
        matching = sorted(nx.max_weight_matching(left, maxcardinality=True))
        matchings.append(matching)
        left.remove_edges_from(matching)
    return matchings


def _coloured(graph: nx.Graph) -> list[list[tuple[int, ...]]]:
    """The edges coloured with at most one colour more than the largest degree (Misra and Gries)."""
    colours = range(max((degree for _, degree in graph.degree), default=0) + 1)
    colour_of: dict[frozenset[int], int] = {}

    def beside(node: int, colour: int) -> int | None:
        """The neighbour at the other end of the node's edge of this colour."""
        ends = (v for v in graph[node] if colour_of.get(frozenset((node, v))) == colour)
        return next(ends, None)

    def free(node: int) -> int:
        return next(colour for colour in colours if beside(node, colour) is None)

    def is_fan(centre: int, fan: list[int]) -> bool:
        """Whether each edge's colour is free at the end before it."""
        return all(
            beside(before, colour_of[frozenset((centre, after))]) is None
            for before, after in itertools.pairwise(fan)
        )

    for centre, first in sorted(graph.edges):
        fan = [first]
        grown = True
        while grown:
            following = (
                v
                for v in sorted(graph[centre])
                if v not in fan
                and (colour := colour_of.get(frozenset((centre, v)))) is not None
                and beside(fan[-1], colour) is None
            )
            grown = (v := next(following, None)) is not None
            fan += [v] if v is not None else []
        of_centre, of_last = free(centre), free(fan[-1])
        # Swaps the two colours along the path from the centre, whose edges have them in turn.
        node, colour, path = centre, of_last, []
        while (end := beside(node, colour)) is not None:
            path.append((frozenset((node, end)), colour))
            node, colour = end, of_centre if colour == of_last else of_last
        for edge, colour in path:
            colour_of[edge] = of_centre if colour == of_last else of_last
        last = next(
            i
            for i, v in enumerate(fan)
            if beside(v, of_last) is None and is_fan(centre, fan[: i + 1])
        )
        for before, after in itertools.pairwise(fan[: last + 1]):
            colour_of[frozenset((centre, before))] = colour_of[frozenset((centre, after))]
        colour_of[frozenset((centre, fan[last]))] = of_last
    matchings = [
        [tuple(sorted(edge)) for edge, colour in colour_of.items() if colour == wanted]
        for wanted in colours
    ]
    return [matching for matching in matchings if matching]
