"""Graphs as tables of neighbors, for policies without a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxcomm.gossip._topologies import require_graph

if TYPE_CHECKING:
    import networkx as nx


class Neighbors(NamedTuple):
    """The neighbors of each worker, padded with the worker itself to the largest degree."""

    table: np.ndarray  # int32[workers, degree]
    linked: np.ndarray  # bool[workers, degree], false for the padding
    degrees: np.ndarray  # int32[workers]


def to_neighbors(graph: nx.Graph, method: str) -> Neighbors:
    """The table of an undirected, connected graph.

    Raises:
      ValueError: If the graph is directed or not connected, or has other nodes than 0 to n - 1.
    """
    workers = require_graph(graph)
    if graph.is_directed():
        raise ValueError(
            f"`graph` is directed, but `{method}` needs answers: use `graph.to_undirected()`."
        )
    own = [sorted(set(graph[worker]) - {worker}) for worker in range(workers)]
    degrees = np.array([len(others) for others in own], np.int32)
    table = np.tile(np.arange(workers, dtype=np.int32)[:, None], (1, max(int(degrees.max()), 1)))
    for worker, others in enumerate(own):
        table[worker, : len(others)] = others
    linked = np.arange(table.shape[1])[None] < degrees[:, None]
    return Neighbors(table, linked, degrees)


def require_size(neighbors: Neighbors, workers: int) -> None:
    """Raises unless the graph has this number of workers."""
    if len(neighbors.table) != workers:
        raise ValueError(
            f"`graph` has {len(neighbors.table)} nodes, but there are {workers} workers."
        )
