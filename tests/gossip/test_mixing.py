"""Mixing matrices against values by hand, and over steps: properties, and what it is made from."""

import pathlib
from typing import Any

import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from matplotlib import image

from jaxcomm import gossip
from tests.gossip.workers import flags_of, matrices_of

RULES = ["metropolis", "max_degree", "best_constant"]
PUSHED = nx.DiGraph([(0, 1), (0, 2), (1, 2), (2, 0)])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("make", [gossip.ring, nx.path_graph, nx.star_graph, nx.complete_graph])
def test_symmetric_and_doubly_stochastic(make: Any, workers: int, rule: str) -> None:
    graph = make(workers)
    weights = gossip.mixing_matrix(graph, rule)
    np.testing.assert_array_equal(weights, weights.T)
    np.testing.assert_allclose(weights.sum(axis=0), 1, rtol=1e-12)
    unconnected = nx.to_numpy_array(graph) == 0
    assert (weights[unconnected & ~np.eye(len(graph), dtype=bool)] == 0).all()
    assert gossip.to_mixing(weights).rho < 1


def test_weights_by_hand() -> None:
    expected = [[5 / 12, 1 / 4, 1 / 3, 0], [1 / 4, 1 / 4, 1 / 4, 1 / 4], [1 / 3, 1 / 4, 5 / 12, 0]]
    graph = nx.Graph([(0, 1), (1, 2), (0, 2), (1, 3)])
    np.testing.assert_allclose(gossip.mixing_matrix(graph)[:3], expected)
    np.testing.assert_allclose(gossip.mixing_matrix(nx.complete_graph(5), "uniform"), 0.2)
    shares = [[1 / 3, 0, 1 / 2], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1 / 2]]
    np.testing.assert_allclose(gossip.mixing_matrix(PUSHED, "push"), shares)


@pytest.mark.parametrize("rule", RULES)
def test_rho_and_gap_of_one_matrix(rule: str) -> None:
    mixing = gossip.to_mixing(nx.path_graph(6), rule)
    slowest = np.abs(np.linalg.eigvalsh(mixing.matrices[0] - 1 / 6)).max()
    np.testing.assert_allclose([mixing.rho, mixing.gap], [slowest**2, 1 - slowest], rtol=1e-9)


def test_the_degree_of_a_star_is_that_of_its_center() -> None:
    mixing = gossip.to_mixing(nx.star_graph(4))
    assert mixing.workers == 5 and mixing.degree == 4 and mixing.expected_rounds == 4
    np.testing.assert_array_equal(mixing.messages, [4, 1, 1, 1, 1])
    assert set(mixing.edges) == {(0, i) for i in range(1, 5)} | {(i, 0) for i in range(1, 5)}
    params = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(5, jnp.bfloat16)}
    assert mixing.bytes_per_step(params) == 4 * (6 * 4 + 5 * 2)
    assert mixing.constant and mixing.symmetric


def test_the_degree_of_push_sum_counts_senders() -> None:
    graph = nx.DiGraph([(0, 1), (1, 2), (2, 3), (1, 0), (2, 0), (3, 0)])  # Three send to 0.
    mixing = gossip.to_mixing(graph, "push")
    assert mixing.degree == 2
    np.testing.assert_array_equal(mixing.messages, [1, 2, 2, 1])
    with pytest.raises(ValueError, match="`rho` is not defined for push-sum weights"):
        mixing.rho.hex()


def test_graphs_alternate_in_order() -> None:
    mixing = gossip.cyclic(gossip.one_peer_exponential(8), "push")
    flags = flags_of(mixing, 7)
    np.testing.assert_array_equal(flags, np.eye(3, dtype=bool)[np.arange(7) % 3])
    assert mixing.degree == 1 and mixing.expected_rounds == 1 and not mixing.constant
    np.testing.assert_allclose(mixing.messages, 1)
    np.testing.assert_allclose(np.linalg.multi_dot(matrices_of(mixing, 3)), 1 / 8)
    # What alternates from worker to worker is gone after the first turn, and whole in the others.
    np.testing.assert_allclose(mixing.rho, 2 / 3)


def test_one_matching_is_drawn_in_each_step() -> None:
    mixing = gossip.randomized(gossip.one_peer_exponential(8, directed=False))
    flags = flags_of(mixing, 3000)
    assert (flags.sum(axis=1) == 1).all()
    assert (np.abs(flags.mean(axis=0) - 1 / 3) < 4 * np.sqrt(2 / 9 / 3000)).all()


def test_lists_of_numbers_are_a_matrix_and_lists_of_graphs_are_turns() -> None:
    half = [[0.5, 0.5], [0.5, 0.5]]
    same = gossip.to_mixing(half)
    assert same.constant and gossip.to_mixing(same) is same
    assert len(gossip.to_mixing([np.asarray(half), nx.path_graph(2)]).matrices) == 2


def test_lazy_mixing_halves_the_neighbor_weights() -> None:
    plan = gossip.matcha_plan(gossip.ring(4), budget=0.5)
    mixing = gossip.lazy_mixing(plan)
    for matrix in mixing.matrices:
        np.testing.assert_allclose(matrix[matrix != 0].max(), 1 - plan.alpha / 2)
    assert mixing.probabilities == plan.probabilities


@pytest.mark.parametrize("mixing", [gossip.torus(3, 3), gossip.one_peer_exponential(8)])
def test_graphs_are_drawn_as_png(mixing: Any, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "graph.png"
    gossip.draw(mixing, file)
    inked = image.imread(file)[..., :3].mean(axis=-1) < 0.8
    assert 0.002 < inked.mean() < 0.3
