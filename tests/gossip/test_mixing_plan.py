"""Mixing over steps: its properties, and what it is made from."""

import pathlib

import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from matplotlib import image

from jaxcomm import gossip
from tests.gossip.graphs import GRAPHS, Base
from tests.gossip.workers import flags_of, matrices_of


def test_a_star_is_as_busy_as_its_center() -> None:
    mixing = gossip.to_mixing(nx.star_graph(4))
    assert mixing.workers == 5 and mixing.degree == 4 and mixing.expected_rounds == 4
    np.testing.assert_array_equal(mixing.messages, [4, 1, 1, 1, 1])
    assert set(mixing.edges) == {(0, i) for i in range(1, 5)} | {(i, 0) for i in range(1, 5)}
    params = {"a": jnp.zeros((3, 2)), "b": jnp.zeros(5, jnp.bfloat16)}
    assert mixing.bytes_per_step(params) == 4 * (6 * 4 + 5 * 2)
    assert mixing.constant and mixing.symmetric


@pytest.mark.parametrize("rule", ["metropolis", "best_constant", "max_degree"])
def test_rho_and_gap_of_one_matrix(rule: str) -> None:
    mixing = gossip.to_mixing(nx.path_graph(6), rule)
    slowest = np.abs(np.linalg.eigvalsh(mixing.matrices[0] - 1 / 6)).max()
    np.testing.assert_allclose(mixing.rho, slowest**2, rtol=1e-9)
    np.testing.assert_allclose(mixing.gap, 1 - slowest, rtol=1e-9)


def test_turns_are_taken_one_after_the_other() -> None:
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


@pytest.mark.parametrize("base", GRAPHS, ids=repr)
def test_the_whole_budget_is_dpsgd(base: Base) -> None:
    plan = gossip.matcha_plan(base.matchings, budget=1)
    np.testing.assert_allclose(plan.probabilities, 1)
    whole = gossip.to_mixing(base.graph, "best_constant")
    np.testing.assert_allclose(plan.alpha, base.alpha, atol=1e-3)
    np.testing.assert_allclose([plan.rho, whole.rho], base.rho, atol=1e-3)
    np.testing.assert_allclose(
        matrices_of(gossip.to_mixing(plan), 1)[0], whole.matrices[0], atol=1e-3
    )


def test_lists_of_numbers_are_a_matrix_and_lists_of_graphs_are_turns() -> None:
    half = [[0.5, 0.5], [0.5, 0.5]]
    assert gossip.to_mixing(half).constant
    assert len(gossip.to_mixing([np.asarray(half), nx.path_graph(2)]).matrices) == 2
    same = gossip.to_mixing(half)
    assert gossip.to_mixing(same) is same


def test_push_sum_has_no_one_rate() -> None:
    graph = nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)])
    with pytest.raises(ValueError, match="`rho` is not defined for push-sum weights"):
        gossip.to_mixing(graph, "push").rho.hex()


def test_the_degree_is_of_senders() -> None:
    graph = nx.DiGraph([(0, 1), (1, 2), (2, 3), (1, 0), (2, 0), (3, 0)])  # Three send to 0.
    mixing = gossip.to_mixing(graph, "push")
    assert mixing.degree == 2
    np.testing.assert_array_equal(mixing.messages, [1, 2, 2, 1])


def test_lazy_halves_what_is_taken_in() -> None:
    plan = gossip.matcha_plan(gossip.ring(4), budget=0.5)
    mixing = gossip.lazy_mixing(plan)
    for matrix in mixing.matrices:
        np.testing.assert_allclose(matrix[matrix != 0].max(), 1 - plan.alpha / 2)
    assert mixing.probabilities == plan.probabilities


@pytest.mark.parametrize(
    "mixing", [gossip.torus(3, 3), gossip.one_peer_exponential(8), gossip.exponential(5)]
)
def test_a_drawing_is_a_png(mixing: object, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "graph.png"
    gossip.draw(mixing, file)
    assert file.read_bytes().startswith(b"\x89PNG")
    inked = image.imread(file)[..., :3].mean(axis=-1) < 0.8
    assert 0.002 < inked.mean() < 0.3
