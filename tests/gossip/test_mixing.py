"""Mixing matrices against values by hand, those of MATCHA's graphs, and what they do to numbers."""

import networkx as nx
import numpy as np
import pytest

from jaxcomm import gossip
from tests.gossip.graphs import GRAPHS, Base

RULES = ["metropolis", "max_degree", "best_constant"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("make", [gossip.ring, nx.path_graph, nx.star_graph, nx.complete_graph])
def test_symmetric_and_doubly_stochastic(make, workers: int, rule: str) -> None:
    graph = make(workers)
    weights = gossip.mixing_matrix(graph, rule)
    np.testing.assert_array_equal(weights, weights.T)
    np.testing.assert_allclose(weights.sum(axis=0), 1, rtol=1e-12)
    apart = nx.to_numpy_array(graph) == 0
    assert (weights[apart & ~np.eye(len(graph), dtype=bool)] == 0).all()
    assert gossip.to_mixing(weights).rho < 1


def test_metropolis_by_hand() -> None:
    expected = [[5 / 12, 1 / 4, 1 / 3, 0], [1 / 4, 1 / 4, 1 / 4, 1 / 4], [1 / 3, 1 / 4, 5 / 12, 0]]
    graph = nx.Graph([(0, 1), (1, 2), (0, 2), (1, 3)])
    np.testing.assert_allclose(gossip.mixing_matrix(graph)[:3], expected)


def test_a_uniform_ring_of_eight_is_where_d2_ends() -> None:
    of_ring = gossip.to_mixing(gossip.ring(8), "uniform")
    eigenvalues = np.linalg.eigvalsh(of_ring.matrices[0])
    np.testing.assert_allclose(eigenvalues[[0, -2]], [-1 / 3, (1 + 2**0.5) / 3])
    np.testing.assert_allclose(of_ring.gap, 1 - (1 + 2**0.5) / 3)


def test_uniform_weights_of_all_are_the_mean() -> None:
    np.testing.assert_allclose(gossip.mixing_matrix(nx.complete_graph(5), "uniform"), 0.2)


@pytest.mark.parametrize("base", GRAPHS, ids=repr)
def test_best_constants_of_known_graphs(base: Base) -> None:
    weights = gossip.mixing_matrix(base.graph, "best_constant")
    np.testing.assert_allclose(gossip.to_mixing(weights).rho, base.rho, atol=1e-3)
    a, b = next(iter(base.graph.edges))
    np.testing.assert_allclose(weights[a, b], base.alpha, atol=1e-3)


@pytest.mark.parametrize("graph", [gossip.ring(7), nx.star_graph(4), gossip.torus(3, 3)])
def test_disagreement_contracts_as_predicted_and_no_faster(graph: nx.Graph) -> None:
    weights = gossip.mixing_matrix(graph)
    rho, n = gossip.to_mixing(weights).rho, len(weights)
    square = lambda x: ((x - x.mean(axis=0)) ** 2).sum()  # noqa: E731
    x = np.random.default_rng(0).normal(size=(n, 30))
    assert square(weights @ x) <= rho * square(x)
    values, vectors = np.linalg.eigh(weights - 1 / n)
    slowest = vectors[:, [np.abs(values).argmax()]]
    np.testing.assert_allclose(square(weights @ slowest), rho * square(slowest))


def test_pushed_shares_are_equal_and_add_to_one() -> None:
    graph = nx.DiGraph([(0, 1), (0, 2), (1, 2), (2, 0)])
    expected = [[1 / 3, 0, 1 / 2], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1 / 2]]
    np.testing.assert_allclose(gossip.mixing_matrix(graph, "push"), expected)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_one_peer_graphs_mix_all_in_a_round_of_them(workers: int) -> None:
    product = np.eye(workers)
    for weights in gossip.one_peer_exponential(workers):
        one_way = np.eye(workers)
        for sender, receiver in weights.edges:
            one_way[receiver, sender] = 1
        product = one_way / 2 @ product
    np.testing.assert_allclose(product, 1 / workers)


@pytest.mark.parametrize(
    "graph,rule,message",
    [
        (nx.path_graph(3), "uniform", "needs equal degrees, got {1, 2}"),
        (gossip.exponential(4), "metropolis", "`graph` is directed, and `rule`='metropolis'"),
    ],
)
def test_impossible_rules(graph: nx.Graph, rule: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gossip.mixing_matrix(graph, rule)
