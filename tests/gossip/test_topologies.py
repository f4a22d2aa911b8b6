"""Graphs have the degrees that they are known for, and mistakes are told."""

import networkx as nx
import pytest

from jaxcomm import gossip
from jaxcomm.gossip._topologies import require_graph

SIZES = [1, 2, 3, 8, 16]


@pytest.mark.parametrize("workers", SIZES)
def test_a_ring_of_any_number_of_workers(workers: int) -> None:
    graph = gossip.ring(workers)
    assert require_graph(graph) == workers and not nx.number_of_selfloops(graph)


@pytest.mark.parametrize(
    "graph,workers,degree",
    [
        (gossip.ring(8), 8, 2),
        (gossip.torus(3, 4), 12, 4),
        (gossip.hypercube(16), 16, 4),
        (gossip.exponential(8, directed=False), 8, 5),
        (gossip.exponential(6, directed=False), 6, 4),
    ],
)
def test_regular_graphs(graph: nx.Graph, workers: int, degree: int) -> None:
    assert require_graph(graph) == workers
    assert {d for _, d in graph.degree} == {degree}


def test_a_torus_is_numbered_by_rows() -> None:
    assert set(gossip.torus(3, 4)[5]) == {1, 4, 6, 9}


def test_a_hypercube_differs_in_one_bit() -> None:
    assert all((a ^ b).bit_count() == 1 for a, b in gossip.hypercube(8).edges)


@pytest.mark.parametrize("workers", [2, 6, 8])
def test_directed_exponential_graphs_reach_all(workers: int) -> None:
    graph = gossip.exponential(workers)
    assert graph.is_directed() and require_graph(graph) == workers
    peers = gossip.one_peer_exponential(workers)
    assert sum(each.number_of_edges() for each in peers) == graph.number_of_edges()
    assert all(d == 1 for each in peers for _, d in each.out_degree)


@pytest.mark.parametrize(
    "graph,message",
    [
        (nx.Graph([("a", "b")]), "must have the workers 0 to n - 1 as nodes"),
        (nx.Graph([(1, 2)]), "must have the workers 0 to n - 1 as nodes"),
        (nx.Graph([(0, 1), (2, 3)]), "not connected"),
        (nx.DiGraph([(0, 1), (1, 2)]), "not connected"),
    ],
)
def test_impossible_graphs(graph, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gossip.mixing_matrix(graph)


def test_impossible_numbers() -> None:
    with pytest.raises(ValueError, match="A hypercube has 2\\*\\*k workers, got `workers`=6"):
        gossip.hypercube(6)
