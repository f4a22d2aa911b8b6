"""GASLoC against NumPy, DiLoCo as its case on a complete graph, and accelerated gossip."""

from typing import Any

import networkx as nx
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import gossip
from jaxcomm.synchronization import average_every
from tests.gossip.workers import matrices_of, start, steps, trajectory
from tests.slow import slow

PERIOD, COUNT = 3, 13
NUMBERS = {"learning_rate": 0.7, "momentum": 0.4}


def by_hand(x: np.ndarray, updates: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    """The equations of the paper, in float64."""
    x = theta = before = x.astype(np.float64)
    found = []
    for t, (update, weights) in enumerate(zip(updates, matrices, strict=True)):
        x = x + update
        if (t + 1) % PERIOD == 0:
            proposed = theta + NUMBERS["learning_rate"] * (x - theta)
            x = theta = weights @ proposed + NUMBERS["momentum"] * (proposed - before)
            before = proposed
        found.append(x)
    return np.stack(found)


@pytest.mark.parametrize("workers", [4, slow(1), slow(5), slow(8)])
@pytest.mark.parametrize("graph", [gossip.ring, slow(gossip.random_pairs)])
def test_against_numpy(graph: Any, workers: int) -> None:
    x, updates = start(workers), steps(COUNT, workers)
    mixing = gossip.to_mixing(graph(workers))
    found, _ = trajectory(gossip.gasloc(mixing, PERIOD, **NUMBERS), x, updates)
    expected = by_hand(x, updates, matrices_of(mixing, COUNT))
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_on_a_complete_graph_it_is_diloco(momentum: float) -> None:
    """All workers without momentum, else their mean: momenta are not averaged."""
    workers = 4
    x = np.tile(start(workers)[:1], (workers, 1))
    updates = steps(COUNT, workers)
    complete = np.full((workers, workers), 1 / workers)
    tx = gossip.gasloc(complete, PERIOD, learning_rate=0.7, momentum=momentum)
    found, _ = trajectory(tx, x, updates)
    outer = optax.sgd(0.7, momentum=momentum or None, nesterov=momentum > 0)
    expected, _ = trajectory(average_every(PERIOD, outer), x, updates)
    ends = slice(PERIOD - 1, None, PERIOD)
    if momentum:
        found, expected = found.mean(axis=1), expected.mean(axis=1)
    np.testing.assert_allclose(found[ends], expected[ends], rtol=0, atol=5e-6)


def test_momentum_accelerates_gossip() -> None:
    """The eigenvalues of the heavy ball have the magnitude of the root of its momentum."""
    workers, count = 16, 60
    mixing = gossip.lazy_mixing(nx.cycle_graph(workers))
    second = np.sort(np.linalg.eigvalsh(mixing.matrices[0]))[-2]
    x, updates = start(workers), np.zeros((count, workers, 12), np.float32)
    left = {}
    for momentum in (0.0, (1 - np.sqrt(1 - second)) ** 2):
        tx = gossip.gasloc(mixing, 1, learning_rate=1.0, momentum=momentum)
        found, _ = trajectory(tx, x, updates)
        left[bool(momentum)] = np.ptp(found[-1], axis=0).max()
    assert left[True] < 0.05 * left[False]


def test_a_message_per_neighbor_and_none_between_exchanges() -> None:
    tx = gossip.gasloc(gossip.ring(4), 5)
    params: Any = jaxcomm.replicate(np.zeros(12, np.float32), 4)
    step = jaxcomm.simulate(lambda w, b: (w * b).sum(), tx, 4)
    state = jaxcomm.init(tx, params, 4)
    sent = jaxcomm.wire.account(step, params, state, np.ones(4, np.float32))
    moved = [c for c in sent.collectives if c.kind == "ppermute"]
    assert [c.bytes_per_worker for c in moved] == [48, 48]
    assert all(c.path for c in moved)
