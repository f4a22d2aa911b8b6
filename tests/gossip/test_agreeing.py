"""Methods refuse a mixing whose workers never agree, and take every one whose workers do."""

from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest

from jaxcomm import compression, gossip
from tests.gossip.workers import flags_of, start, trajectory

TOP = compression.sparsifiers.top_k(k=3)
METHODS: dict[str, Callable[[Any], Any]] = {
    "dpsgd": gossip.dpsgd,
    "d2": gossip.d2,
    "choco_sgd": lambda mixing: gossip.choco_sgd(mixing, TOP, step_size=0.1),
    "choco_step_size": lambda mixing: gossip.choco_step_size(mixing, contraction=0.5),
    "deep_squeeze": lambda mixing: gossip.deep_squeeze(mixing, TOP, step_size=0.1),
    "sgp": gossip.sgp,
    "noloco": gossip.noloco,
}
IN_PAIRS = np.kron(np.eye(2), np.full((2, 2), 0.5))
SWAP = np.array([[0.0, 1.0], [1.0, 0.0]])


def pair(i: int, j: int, own: float = 0.5, n: int = 4) -> np.ndarray:
    """Workers i and j mix, the others do not."""
    matrix = np.eye(n)
    matrix[[i, i, j, j], [i, j, i, j]] = own, 1 - own, 1 - own, own
    return matrix


@pytest.mark.parametrize("method", METHODS)
def test_every_method_refuses_disconnected_graphs(method: str) -> None:
    with pytest.raises(ValueError, match="Worker 0 never agrees with 2: the graph is not conn"):
        METHODS[method](IN_PAIRS)


@pytest.mark.parametrize(
    ("mixing", "message"),
    [
        (np.array([[-0.2, 1.2], [1.2, -0.2]]), r"of magnitude 1\.4: .*`gossip\.lazy"),
        (SWAP, "of magnitude 1: "),
        (
            gossip.Mixing((IN_PAIRS, pair(1, 2)), (1.0, 0.0), lambda *_: np.array([True, False])),
            "agree",
        ),
        (gossip.matcha_plan(gossip.ring(4), budget=0.5)._replace(alpha=1.9), "agree"),
    ],
)
def test_mixings_without_consensus_are_refused(mixing: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gossip.dpsgd(mixing)


def test_one_directional_links_are_not_enough() -> None:
    with pytest.raises(ValueError, match="Worker 1 never agrees with 0"):
        gossip.sgp(np.array([[1.0, 0.5], [0.0, 0.5]]))


@pytest.mark.parametrize(
    "mixing",
    [
        np.eye(1),
        gossip.random_pairs(1),
        gossip.lazy_mixing(SWAP),
        gossip.randomized([SWAP, np.full((2, 2), 0.5)]),
        gossip.to_mixing(nx.star_graph(4), "best_constant"),  # Negative for the center itself.
        nx.path_graph(1000),
    ],
)
def test_mixings_with_consensus_are_accepted(mixing: Any) -> None:
    gossip.dpsgd(mixing)


def _spread(matrices: list[np.ndarray]) -> float:
    """The largest difference of workers that begin with all unit vectors, after many products."""
    mean = 1 / len(matrices[0])
    product = np.linalg.multi_dot([np.eye(len(matrices[0])), *reversed(matrices)])
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(12):
            product = product @ product
    return float(np.max(np.abs(product - mean)))


def test_acceptance_matches_products_of_matrices() -> None:
    """Random lists of weights between pairs, some negative, against 4096 rounds of them."""
    rng, taken = np.random.default_rng(0), []
    for _ in range(60):
        pairs = [rng.choice(4, 2, replace=False) for _ in range(rng.integers(1, 5))]
        matrices = [pair(*each, own=rng.choice([-0.4, 0.0, 0.3, 0.9])) for each in pairs]
        try:
            gossip.dpsgd(matrices)
            taken.append(True)
        except ValueError:
            taken.append(False)
        assert taken[-1] == (_spread(matrices) < 1e-3), matrices
    assert 10 < sum(taken) < 50


def test_noloco_takes_turns_by_exchanges() -> None:
    """Not by steps, of which only every other one is an exchange: all four would never be used."""
    mixing, period = gossip.cyclic([pair(0, 1), pair(2, 3), pair(0, 2), pair(1, 3)]), 2
    after = start(4).astype(np.float64)
    tx = gossip.noloco(mixing, period, momentum=0.0, learning_rate=1.0)
    found, _ = trajectory(tx, start(4), np.zeros((24 * period, 4, 12), np.float32))
    order = flags_of(mixing, 4).argmax(axis=1)
    for number, mixed in enumerate(found[period - 1 :: period]):
        after = mixing.matrices[order[number % 4]] @ after
        np.testing.assert_allclose(mixed, after, atol=1e-5)
