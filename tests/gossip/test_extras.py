"""Weights and absence are honoured by every method as the formula says, or refused by name."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import gossip
from tests.cases._gossip import GossipCase, gossip_rows
from tests.gossip.workers import initial_of_start, matrices_of, start, steps, trajectory

COUNT = 12
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


def without_samples() -> np.ndarray:
    """Updates that are NaN where the weight is 0."""
    updates = steps(COUNT, 8)
    updates[:, WEIGHT == 0] = np.nan
    return updates


@pytest.mark.parametrize("case", gossip_rows(8), ids=repr)
def test_present_and_weight_are_in_the_formula(case: GossipCase) -> None:
    """Two workers are absent at first, and come back."""
    x, updates, half = start(8), without_samples(), COUNT // 2
    tx, weight = case.make(8), jnp.asarray(WEIGHT)
    matrices = matrices_of(case.mixing(8), COUNT)
    found, state, last = [], initial_of_start(tx, 8), x
    later = PRESENT if case.resumes else np.ones(8, bool)
    if case.absence:
        matrices[:half] = without(matrices[:half], PRESENT)
        matrices[half:] = without(matrices[half:], later)
    else:
        with pytest.raises(ValueError, match="`present` needs `choco_sgd"):
            trajectory(tx, x, updates, present=jnp.asarray(PRESENT))
    for of_half, mask in ((updates[:half], PRESENT), (updates[half:], later)):
        extra = {"present": jnp.asarray(mask)} if case.absence else {}
        rows, state = trajectory(tx, last, of_half, first=state, weight=weight, **extra)
        found, last = [*found, *rows], rows[-1].astype(np.float32)
    weighed = np.where(WEIGHT[:, None] == 0, 0, shares(WEIGHT, matrices) * updates)
    np.testing.assert_allclose(found, case.oracle(x, weighed, matrices), rtol=0, atol=3e-6)


@pytest.mark.parametrize("case", gossip_rows(8), ids=repr)
def test_only_weight_ratios_matter_and_invalid_weights_are_reported(case: GossipCase) -> None:
    def weighted(weight: Any, updates: np.ndarray) -> np.ndarray:
        return trajectory(tx, start(8), updates, first=first, weight=jnp.asarray(weight))[0]

    tx, updates = case.make(8), without_samples()
    first = initial_of_start(tx, 8)
    found = weighted(WEIGHT, updates)
    for factor in (64, 2.0**-40):
        np.testing.assert_array_equal(weighted(factor * WEIGHT, updates), found)
    plain = trajectory(tx, start(8), np.nan_to_num(updates), first=first)[0]
    np.testing.assert_array_equal(weighted(jnp.full(8, 3.0), np.nan_to_num(updates)), plain)
    for wrong in (-1, np.nan, np.inf):  # NaN where it was given, and nowhere a wrong number.
        found = weighted(np.where(np.arange(8) == 3, np.float32(wrong), WEIGHT), updates)
        assert np.isnan(found[-1, 3]).any()


def test_noloco_weighs_displacements_by_the_sum_of_weights() -> None:
    """Steps between exchanges are those of the optimizer."""
    count, rng = 6, np.random.default_rng(5)
    tx = gossip.noloco(gossip.ring(2), 3, momentum=0.0, learning_rate=0.5, pull=1.0)
    weights = rng.integers(0, 4, (count, 2)).astype(np.float32)
    found, updates, state = start(2), steps(count, 2), None
    now, anchor, total = found.astype(np.float64), found.astype(np.float64), np.zeros((2, 1))
    for t in range(count):
        xs, state = trajectory(tx, found, updates[t : t + 1], first=state, weight=weights[t])
        found = xs[-1].astype(np.float32)
        now = now + np.where(weights[t][:, None] == 0, 0, updates[t])
        total = total + weights[t][:, None]
        if t % 3 == 2:
            mean = np.sum(total * (now - anchor), axis=0) / total.sum()
            now = np.broadcast_to(anchor.mean(axis=0) + 0.5 * mean, now.shape)
            anchor, total = now, np.zeros((2, 1))
        np.testing.assert_allclose(found, now, atol=1e-6)
