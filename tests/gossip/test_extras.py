"""Weights and absence are honoured by every method as the formula says, or refused by name."""

from typing import Any

import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest

import jaxcomm
from jaxcomm import gossip
from tests.cases._gossip import GOSSIP, GossipCase, gossip_rows
from tests.gossip.workers import matrices_of, start, steps, trajectory
from tests.slow import slow

COUNT = 6
PRESENT = np.array([True, True, False, True, True, True, False, True])
WEIGHT = np.array([1.0, 0, 2, 1, 0.5, 0, 1, 3], np.float32)


def without(matrices: np.ndarray, present: np.ndarray) -> np.ndarray:
    """W without links of those who are absent: what they would have sent stays with its sender."""
    both = present[:, None] & present[None, :]
    left = np.where(both | np.eye(len(present), dtype=bool), matrices, 0)
    return left + np.eye(len(present)) * (1 - left.sum(axis=1, keepdims=True))


def shares(weight: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    """Weights over their means over those who talk, [steps, n, 1]."""
    hears = (matrices != 0) | np.eye(len(weight), dtype=bool)
    means = (hears @ weight) / hears.sum(axis=-1)
    return np.where(weight == 0, 0, weight / np.where(weight == 0, 1, means))[..., None]


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", gossip_rows(8), ids=repr)
def test_present_and_weight_are_in_the_formula(case: GossipCase) -> None:
    x, updates = start(8), steps(COUNT, 8)
    updates[:, WEIGHT == 0] = np.nan  # Means over no samples.
    extra = {"weight": jnp.asarray(WEIGHT)}
    matrices = matrices_of(case.mixing(8), COUNT)
    if not case.absence:
        with pytest.raises(ValueError, match="`present` needs `choco_sgd"):
            trajectory(case.make(8), x, updates, present=jnp.asarray(PRESENT))
    else:
        extra["present"] = jnp.asarray(PRESENT)
        matrices = without(matrices, PRESENT)
    weighed = np.where(WEIGHT[:, None] == 0, 0, shares(WEIGHT, matrices) * updates)
    found, _ = trajectory(case.make(8), x, updates, **extra)
    np.testing.assert_allclose(found, case.oracle(x, weighed, matrices), rtol=0, atol=3e-6)


@pytest.mark.parametrize("case", gossip_rows(8, {case.name for case in GOSSIP}), ids=repr)
def test_a_constant_factor_in_the_weights_changes_nothing(case: GossipCase) -> None:
    x, updates = start(8), steps(COUNT, 8)
    updates[:, WEIGHT == 0] = np.nan
    found, *others = [
        trajectory(case.make(8), x, updates, weight=jnp.asarray(factor * WEIGHT))[0]
        for factor in (1, 64, 2.0**-40)
    ]
    for other in others:
        np.testing.assert_array_equal(other, found)
    plain = trajectory(case.make(8), x, np.nan_to_num(updates))[0]
    equal = trajectory(case.make(8), x, np.nan_to_num(updates), weight=jnp.full(8, 3.0))[0]
    np.testing.assert_array_equal(equal, plain)


@pytest.mark.parametrize("weights", [[1.0, 2, 5, 0.5], [0, 3, 0, 1], [0, 0, 2, 0]], ids=str)
def test_where_all_are_neighbors_the_mean_moves_by_the_weighted_mean(weights: list[float]) -> None:
    """Computed on one device."""
    tx, x, updates = gossip.dpsgd(nx.complete_graph(4)), start(4), steps(1, 4)
    found, _ = trajectory(tx, x, updates, weight=jnp.asarray(weights))
    expected = x.mean(axis=0) + np.average(updates[0], axis=0, weights=weights)
    np.testing.assert_allclose(found[0].mean(axis=0), expected, atol=1e-6)


def test_noloco_weighs_displacements_by_the_sum_of_weights() -> None:
    """Steps between exchanges are those of the optimizer."""
    count, rng = 6, np.random.default_rng(5)
    tx = gossip.noloco(gossip.ring(2), 3, momentum=0.0, learning_rate=0.5, pull=1.0)
    weights = rng.integers(0, 4, (count, 2)).astype(np.float32)
    x, updates, expected = start(2), steps(count, 2), []
    now, anchor, total = x.astype(np.float64), x.astype(np.float64), np.zeros((2, 1))
    state, found = None, x
    for t in range(count):
        xs, state = trajectory(tx, found, updates[t : t + 1], first=state, weight=weights[t])
        found = xs[-1].astype(np.float32)
        now = now + np.where(weights[t][:, None] == 0, 0, updates[t])
        total = total + weights[t][:, None]
        if t % 3 == 2:
            mean = np.sum(total * (now - anchor), axis=0) / total.sum()
            now = np.broadcast_to(anchor.mean(axis=0) + 0.5 * mean, now.shape)
            anchor, total = now, np.zeros((2, 1))
        expected = now
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_weight_adds_four_bytes_to_each_message() -> None:
    tx, p = gossip.dpsgd(gossip.ring(8)), jaxcomm.replicate(jnp.zeros(12), 8)

    def sent(**kwargs: Any) -> list[float]:
        step = jaxcomm.simulate(
            lambda w, b: jnp.sum(w) * jnp.mean(b), tx, 8, metrics="own", **kwargs
        )
        account = jaxcomm.wire.account(step, p, jaxcomm.init(tx, p, 8), jnp.ones(8))
        return sorted(c.bytes_per_worker for c in account.collectives)

    def weighted(loss: Any, p: Any, b: Any) -> Any:
        return *jaxcomm.local_value_and_grad(loss)(p, b), b[0]

    assert sent() == [48, 48]
    assert sent(gradients=weighted) == [4, 4, 48, 48]


@pytest.mark.parametrize("weight", [-1.0, slow(np.nan), slow(np.inf)])
@pytest.mark.parametrize("case", gossip_rows(8, {"dpsgd", "matcha"}), ids=repr)
def test_a_weight_that_is_none_is_seen(case: GossipCase, weight: float) -> None:
    """NaN where it was given, and nowhere a wrong number."""
    weights = WEIGHT.copy()
    weights[3] = weight
    found, _ = trajectory(case.make(8), start(8), steps(2 + case.late, 8), weight=weights)
    assert np.isnan(found[-1, 3]).any()
