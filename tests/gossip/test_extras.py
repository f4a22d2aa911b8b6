"""Weights and absence are honoured by every method as the formula says, or refused by name."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases._gossip import GossipCase, gossip_rows
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


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", gossip_rows(8), ids=repr)
def test_present_and_weight_are_in_the_formula(case: GossipCase) -> None:
    x, updates = start(8), steps(COUNT, 8)
    updates[:, WEIGHT == 0] = np.nan  # Means over no samples.
    weighed = np.where(WEIGHT[:, None] == 0, 0, WEIGHT[:, None] * updates)
    extra = {"weight": jnp.asarray(WEIGHT)}
    matrices = matrices_of(case.mixing(8), COUNT)
    if not case.absence:
        with pytest.raises(ValueError, match="`present` needs separate copies for each neighbor"):
            trajectory(case.make(8), x, updates, present=jnp.asarray(PRESENT))
    else:
        extra["present"] = jnp.asarray(PRESENT)
        matrices = without(matrices, PRESENT)
    found, _ = trajectory(case.make(8), x, updates, **extra)
    np.testing.assert_allclose(found, case.oracle(x, weighed, matrices), rtol=0, atol=3e-6)


@pytest.mark.parametrize("weight", [-1.0, slow(np.nan), slow(np.inf)])
@pytest.mark.parametrize("case", gossip_rows(8, {"dpsgd", "matcha"}), ids=repr)
def test_a_weight_that_is_none_is_seen(case: GossipCase, weight: float) -> None:
    """NaN where it was given, and nowhere a wrong number."""
    weights = WEIGHT.copy()
    weights[3] = weight
    found, _ = trajectory(case.make(8), start(8), steps(2 + case.late, 8), weight=weights)
    assert np.isnan(found[-1, 3]).any()
