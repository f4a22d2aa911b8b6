"""Graphs have the degrees and the numbering that they are known for."""

import networkx as nx
import pytest

from jaxcomm import gossip
from jaxcomm.gossip._topologies import require_graph


@pytest.mark.parametrize(
    "graph,workers,degree",
    [
        (gossip.ring(1), 1, 0),
        (gossip.ring(2), 2, 1),
        (gossip.ring(8), 8, 2),
        (gossip.torus(3, 4), 12, 4),
        (gossip.hypercube(16), 16, 4),
        (gossip.exponential(8, directed=False), 8, 5),
        (gossip.exponential(6, directed=False), 6, 4),
    ],
)
def test_regular_graphs(graph: nx.Graph, workers: int, degree: int) -> None:
    assert require_graph(graph) == workers and not nx.number_of_selfloops(graph)
    assert {d for _, d in graph.degree} == {degree}


def test_a_torus_is_numbered_by_rows_and_a_hypercube_by_bits() -> None:
    assert set(gossip.torus(3, 4)[5]) == {1, 4, 6, 9}
    assert all((a ^ b).bit_count() == 1 for a, b in gossip.hypercube(8).edges)


@pytest.mark.parametrize("workers", [2, 6, 8])
def test_directed_exponential_graphs_reach_all(workers: int) -> None:
    graph = gossip.exponential(workers)
    assert graph.is_directed() and require_graph(graph) == workers
    peers = gossip.one_peer_exponential(workers)
    assert sum(each.number_of_edges() for each in peers) == graph.number_of_edges()
    assert all(d == 1 for each in peers for _, d in each.out_degree)
