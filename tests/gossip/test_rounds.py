"""Rounds are permutations in part, all messages are in them, and there are no more than need be."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from jaxcomm import gossip
from jaxcomm.gossip._matchings import _edge_coloring, to_matchings, to_rounds


def largest_degree(weights: np.ndarray) -> int:
    off_diagonal = (weights != 0) & ~np.eye(len(weights), dtype=bool)
    return max(off_diagonal.sum(axis=0).max(), off_diagonal.sum(axis=1).max())


def check(weights: np.ndarray) -> None:
    rounds = to_rounds(weights)
    assert len(rounds) == largest_degree(weights)
    for each in rounds:
        assert len({s for s, _ in each}) == len({r for _, r in each}) == len(each)
    messages = sorted(message for each in rounds for message in each)
    receivers, senders = np.nonzero(weights * ~np.eye(len(weights), dtype=bool))
    assert messages == sorted(zip(senders.tolist(), receivers.tolist(), strict=True))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 12).flatmap(lambda n: arrays.arrays(bool, (n, n), elements=st.booleans())))
def test_any_pattern_of_messages(pattern: np.ndarray) -> None:
    """In a graph of even degree, no two workers send to each other in the same round."""
    check(pattern.astype(float))
    weights = np.triu(pattern, 1).astype(float)
    weights += weights.T
    check(weights)
    if largest_degree(weights) % 2 == 0:
        for each in to_rounds(weights):
            assert not set(each) & {(receiver, sender) for sender, receiver in each}


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 64])
def test_rings_take_two_rounds_and_one_peer_graphs_one(workers: int) -> None:
    assert len(to_rounds(gossip.mixing_matrix(gossip.ring(workers)))) == min(workers - 1, 2)
    for graph in gossip.one_peer_exponential(workers):
        weights = nx.to_numpy_array(graph, nodelist=range(workers)).T
        assert len(to_rounds(weights)) == (workers > 1)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(2, 14), st.floats(0, 1), st.integers(0, 2**16))
def test_matchings_are_disjoint_and_complete(workers: int, probability: float, seed: int) -> None:
    graph = nx.gnp_random_graph(workers, probability, seed=seed)
    # Of the two decompositions that `to_matchings` tries, the coloring alone states its number.
    for matchings in (to_matchings(graph), _edge_coloring(graph)):
        assert len(matchings) <= max(d for _, d in graph.degree) + 1
        for matching in matchings:
            ends = [worker for edge in matching for worker in edge]
            assert len(ends) == len(set(ends))
        edges = sorted(edge for matching in matchings for edge in matching)
        assert edges == sorted(tuple(sorted(edge)) for edge in graph.edges)


@pytest.mark.parametrize("graph", [gossip.ring(8), gossip.hypercube(8), gossip.torus(4, 4)])
def test_bipartite_graphs_need_as_many_matchings_as_the_degree(graph: nx.Graph) -> None:
    assert len(to_matchings(graph)) == graph.degree[0]
