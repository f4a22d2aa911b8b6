"""MATCHA's plan against values of its paper's graphs, and against what is drawn."""

from typing import Any

import networkx as nx
import numpy as np
import pytest

from jaxcomm import gossip
from tests.gossip.graphs import GRAPHS, Base
from tests.gossip.workers import flags_of, matrices_of
from tests.slow import slow

PAIRS = [(base, budget) for base in GRAPHS for budget in base.matcha]


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
def test_the_whole_budget_is_dpsgd_with_the_best_constant(base: Base) -> None:
    plan, whole = (
        gossip.matcha_plan(base.matchings, 1),
        gossip.to_mixing(base.graph, "best_constant"),
    )
    assert plan.probabilities == (1,) * len(base.matchings)
    a, b = next(iter(base.graph.edges))
    np.testing.assert_allclose([plan.alpha, whole.matrices[0][a, b]], base.alpha, atol=1e-3)
    np.testing.assert_allclose([plan.rho, whole.rho], base.rho, atol=1e-3)
    mixed = matrices_of(gossip.to_mixing(plan), 1)[0]
    np.testing.assert_allclose(mixed, whole.matrices[0], atol=1e-3)


@pytest.mark.parametrize("base", [GRAPHS[0], *map(slow, GRAPHS[1:])], ids=repr)
def test_draws_follow_the_planned_probabilities(base: Base) -> None:
    """How often, and the mean squared distance after a step, of what contracts least."""
    plan, draws = gossip.matcha_plan(base.matchings, 0.5), 20_000
    mixing = gossip.to_mixing(plan)
    np.testing.assert_allclose(mixing.rho, plan.rho, atol=1e-6)
    active, mixed = flags_of(mixing, draws), matrices_of(mixing, draws)
    for matrix, matching in zip(mixing.matrices, plan.matchings, strict=True):
        part = nx.empty_graph(plan.workers)
        part.add_edges_from(matching)
        laplacian = nx.laplacian_matrix(part).toarray()
        np.testing.assert_allclose(matrix, np.eye(plan.workers) - plan.alpha * laplacian)
    chances = np.asarray(plan.probabilities)
    error = np.sqrt(chances * (1 - chances) / draws)
    assert (np.abs(active.mean(axis=0) - chances) <= 4 * error + 1e-6).all()
    rounds = active.sum(axis=1)
    assert abs(rounds.mean() - plan.expected_rounds) < 4 * rounds.std() / draws**0.5 + 1e-9
    squares = np.einsum("kij,kil->kjl", mixed, mixed) - 1 / plan.workers
    slowest = np.linalg.eigh(squares.mean(axis=0))[1][:, -1]
    left = np.einsum("i,kij,j->k", slowest, squares, slowest)
    assert abs(left.mean() - plan.rho) < 4 * left.std() / draws**0.5


def test_plans_for_two_workers_and_for_one() -> None:
    plan = gossip.matcha_plan(gossip.torus(4, 4), 0.5)
    assert len(plan.matchings) == 4 and plan.workers == 16
    edges = {edge for matching in plan.matchings for edge in matching}
    assert edges == {tuple(sorted(edge)) for edge in gossip.torus(4, 4).edges}
    pair = gossip.matcha_plan(nx.path_graph(2), 1)
    np.testing.assert_allclose([pair.alpha, pair.rho], [0.5, 0], atol=1e-6)
    assert gossip.matcha_plan(nx.path_graph(1), 0.5).matchings == ()


def test_random_periodic_matches_known_values() -> None:
    # rho of the periodic baseline at budgets .5, .2, .1, computed with another programme.
    known = {0: (0.8269, 0.9308, 0.9654), 1: (0.9650, 0.9860, 0.9930), 5: (0.7772, 0.9109, 0.9554)}
    graphs = {0: GRAPHS[0], 1: GRAPHS[1], 5: next(g for g in GRAPHS if g.graph.size() == 8)}
    for number, values in known.items():
        found = [gossip.random_periodic(graphs[number].graph, b).rho for b in (0.5, 0.2, 0.1)]
        np.testing.assert_allclose(found, values, atol=1e-3)


@pytest.mark.parametrize(
    "graph,message",
    [
        (gossip.exponential(4), "`graph` is directed"),
        ([[(0, 1), (1, 2)]], "Matching 0 has more than one edge at a worker"),
    ],
)
def test_impossible_plans(graph: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gossip.matcha_plan(graph, 0.5)
