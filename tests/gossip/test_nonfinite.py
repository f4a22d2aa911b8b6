"""One worker's NaN: it loses its step and nothing else, or all lose the step together; counted."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import gossip
from tests.cases._gossip import GOSSIP, GossipCase, gossip_rows
from tests.gossip.test_methods import STEPS
from tests.gossip.workers import matrices_of, start, steps, trajectory
from tests.slow import slow

AT, WHO, FEW = 2, 3, 6
ALL = {case.name for case in GOSSIP}


def spoiled(value: float) -> tuple[np.ndarray, np.ndarray]:
    """The updates of 8 workers, one coordinate of which is not finite in one step; and without."""
    updates = steps(STEPS, 8)
    lost = updates.copy()
    lost[AT, WHO] = 0
    updates[AT, WHO, 5] = value
    return updates, lost


@pytest.mark.quick(5)
@pytest.mark.parametrize("value", [np.nan, slow(np.inf)])
@pytest.mark.parametrize("case", gossip_rows(8, ALL), ids=repr)
def test_a_worker_leaves_its_own_step_out_and_mixes(case: GossipCase, value: float) -> None:
    updates, lost = spoiled(value)
    found, state = trajectory(case.make(8), start(8), updates)
    expected = case.oracle(start(8), lost[:FEW], matrices_of(case.mixing(8), FEW))
    np.testing.assert_allclose(found[:FEW], expected, rtol=0, atol=2e-6)
    counts = getattr(state, "gossip", state).skipped_steps.per_worker["data"]
    np.testing.assert_array_equal(counts, np.arange(8) == WHO)


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", gossip_rows(8), ids=repr)
def test_with_skip_nonfinite_all_leave_it_out_and_nothing_is_lost(case: GossipCase) -> None:
    """As if the step had not been: parameters, memory, coins and turns."""
    tx = jaxcomm.skip_nonfinite(optax.chain(optax.identity(), case.make(8)))
    updates = spoiled(np.nan)[0][: FEW + 1]
    found, state = trajectory(tx, start(8), updates[:FEW])
    expected, after = trajectory(tx, start(8), np.delete(updates, AT, axis=0))
    np.testing.assert_array_equal(found[AT], found[AT - 1])
    np.testing.assert_array_equal(np.delete(found, AT, axis=0), expected[:-1])
    assert (state.skipped_steps, after.skipped_steps) == (1, 0)


def test_info_counts_what_is_left_out() -> None:
    updates = spoiled(np.nan)[0][:FEW]
    updates[AT, 0] = np.inf
    _, state = trajectory(gossip.dpsgd(gossip.ring(8), diagnostics=True), start(8), updates)
    assert state.diagnostics["skipped_steps"] == 2
    weight = jnp.ones(8).at[jnp.array([0, WHO])].set(0)  # Means over no samples are no loss.
    tx = gossip.dpsgd(gossip.ring(8), diagnostics=True)
    assert trajectory(tx, start(8), updates, weight=weight)[1].diagnostics["skipped_steps"] == 0


def test_what_the_dtype_cannot_hold_is_left_out() -> None:
    """Steps of float16 beyond 65504: by itself, by its weight, and added to parameters."""
    updates = np.zeros((1, 4, 3), np.float16)
    updates[0, 0, 1], updates[0, 1, 1] = 6.5e4, 3e4
    updates[0, 2, 1], updates[0, 3, 1] = 4e4, 4e4
    first = np.zeros((4, 3), np.float16)
    first[0, 1] = first[2, 1] = 3e4
    # Relative to neighbors: 0.59, 2.3, 0.17, 0.22.
    tx, weight = gossip.dpsgd(gossip.ring(4)), jnp.array([1.0, 4.0, 0.25, 0.1])
    found, state = trajectory(tx, first, updates, weight=weight)
    np.testing.assert_array_equal(state.skipped_steps.per_worker["data"], [1, 1, 0, 0])
    assert np.isfinite(found).all()
