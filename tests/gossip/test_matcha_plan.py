"""MATCHA's plan against values of its paper's graphs, and against what is drawn."""

import networkx as nx
import numpy as np
import pytest

from jaxcomm import gossip
from jaxcomm.gossip._mixing import laplacian
from tests.gossip.graphs import GRAPHS, Base

PAIRS = [(base, budget) for base in GRAPHS for budget in base.matcha]


@pytest.mark.parametrize("base", GRAPHS, ids=repr)
def test_laplacians(base: Base) -> None:
    eigenvalues = np.linalg.eigvalsh(laplacian(base.graph))
    np.testing.assert_allclose(eigenvalues[[1, -1]], [base.lambda_2, base.lambda_n], atol=1e-3)


@pytest.mark.parametrize("base,budget", PAIRS, ids=repr)
def test_known_plans(base: Base, budget: str) -> None:
    plan = gossip.matcha_plan(base.matchings, float(budget))
    for name, expected in base.matcha[budget].items():
        np.testing.assert_allclose(getattr(plan, name), expected, atol=1e-3)
    assert [len(matching) for matching in plan.matchings] == [*map(len, base.matchings)]
    rounds = float(budget) * len(base.matchings)
    assert rounds - 1e-3 < plan.expected_rounds <= rounds + 1e-9
    assert all(0 <= p <= 1 for p in plan.probabilities)


@pytest.mark.parametrize("base", GRAPHS, ids=repr)
def test_all_matchings_at_once_are_the_best_constant(base: Base) -> None:
    plan = gossip.matcha_plan(base.matchings, 1)
    assert plan.probabilities == (1,) * len(base.matchings)
    np.testing.assert_allclose([plan.alpha, plan.rho], [base.alpha, base.rho], atol=1e-3)


@pytest.mark.quick(1)
@pytest.mark.parametrize("base", GRAPHS, ids=repr)
def test_what_is_left_on_average_is_that_of_the_formula(base: Base) -> None:
    """Mean squared distance after a step, of what contracts least, over drawn matrices."""
    plan, draws = gossip.matcha_plan(base.matchings, 0.5), 20_000
    n, rng = plan.workers, np.random.default_rng(0)
    laplacians = np.zeros((len(plan.matchings), n, n))
    for each, matching in zip(laplacians, plan.matchings, strict=True):
        for a, b in matching:
            each[[a, b], [a, b]] += 1
            each[[a, b], [b, a]] -= 1
    active = rng.random((draws, len(laplacians))) < plan.probabilities
    mixed = np.eye(n) - plan.alpha * np.tensordot(active * 1.0, laplacians, 1)
    np.testing.assert_allclose(mixed.sum(axis=1), 1)
    squares = np.einsum("kij,kil->kjl", mixed, mixed)
    _, vectors = np.linalg.eigh(squares.mean(axis=0) - 1 / n)
    left = np.einsum("i,kij,j->k", vectors[:, -1], squares - 1 / n, vectors[:, -1])
    assert abs(left.mean() - plan.rho) < 4 * left.std() / draws**0.5
    rounds = active.sum(axis=1)
    assert abs(rounds.mean() - plan.expected_rounds) < 4 * rounds.std() / draws**0.5 + 1e-9


def test_a_graph_is_decomposed() -> None:
    plan = gossip.matcha_plan(gossip.torus(4, 4), 0.5)
    assert len(plan.matchings) == 4 and plan.workers == 16
    edges = {edge for matching in plan.matchings for edge in matching}
    assert edges == {tuple(sorted(edge)) for edge in gossip.torus(4, 4).edges}


def test_one_worker_and_two() -> None:
    assert gossip.matcha_plan(nx.path_graph(1), 0.5).matchings == ()
    pair = gossip.matcha_plan(nx.path_graph(2), 1)
    np.testing.assert_allclose([pair.alpha, pair.rho], [0.5, 0], atol=1e-6)


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    "graph,budget,message",
    [
        (gossip.exponential(4), 0.5, "`graph` is directed"),
        ([[(0, 1), (1, 2)]], 0.5, "Matching 0 has more than one edge at a worker"),
        ([[(0, 1)], [(2, 3)]], 0.5, "not connected"),
        ([[(0, 2)]], 0.5, "the workers 0 to n - 1 as nodes"),
        (nx.Graph([(0, 1), (2, 3)]), 0.5, "not connected"),
    ],
)
def test_impossible_plans(graph, budget: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gossip.matcha_plan(graph, budget)
