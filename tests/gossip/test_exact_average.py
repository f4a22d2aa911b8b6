"""An exact average now and then, around every method: what it keeps, sends and leaves behind."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import gossip
from tests.cases._gossip import GossipCase, gossip_rows
from tests.gossip.test_programs import program
from tests.gossip.workers import start, steps, trajectory

EVERY, COUNT = 3, 12


@pytest.mark.parametrize("case", gossip_rows(8), ids=repr)
def test_every_method_continues_from_the_exact_mean(case: GossipCase) -> None:
    """The mean of what was there at first and of all steps since, on all workers, each time.

    Then steps are 0: workers that agree stay as they are, whatever the method remembers.
    """
    x, updates = start(8), steps(COUNT, 8)
    updates[8 - case.late :] = 0
    found, _ = trajectory(gossip.periodic_averaging(EVERY, case.make(8)), x, updates)
    moved = np.cumsum(updates.astype(np.float64).mean(axis=1), axis=0)
    for step in range(EVERY, COUNT + 1, EVERY):
        kept = x.astype(np.float64).mean(axis=0) + moved[max(step - 1 - case.late, 0)]
        expected = np.tile(kept, (8, 1))
        np.testing.assert_allclose(found[step - 1], expected, rtol=0, atol=1e-6, err_msg=str(step))
    assert np.ptp(found[EVERY], axis=0).max() > 0.01  # Steps are workers' own in between.
    if not case.corrects:
        np.testing.assert_allclose(found[9:], np.broadcast_to(found[8], (3, 8, 12)), atol=1e-6)


@pytest.mark.parametrize("case", [case for case in gossip_rows(8) if case.absence], ids=repr)
def test_absent_workers_are_not_averaged(case: GossipCase) -> None:
    present, x = np.array([True, True, False, True, True, False, True, True]), start(8)
    exact = gossip.periodic_averaging(EVERY, case.make(8))
    nothing = np.zeros((EVERY, 8, 12), np.float32)
    found, _ = trajectory(exact, x, nothing, present=jnp.asarray(present))
    np.testing.assert_array_equal(found[-1][~present], x[~present])
    together = x[present].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(found[-1][present], np.tile(together, (6, 1)), atol=1e-6)


@pytest.mark.parametrize("asked", [True, False])
def test_exact_averages_can_be_requested_in_any_step(asked: bool) -> None:
    dpsgd = gossip.dpsgd(gossip.ring(8))
    found, _ = trajectory(dpsgd, start(8), steps(1, 8), exact=jnp.array(asked))
    assert (np.ptp(found[0], axis=0).max() < 1e-6) == asked


def test_exact_averages_send_only_in_their_steps() -> None:
    run, args = program(gossip.periodic_averaging(EVERY, gossip.dpsgd(gossip.ring(8))))
    sent = jaxcomm.wire.account(run, *args).collectives
    sums = [c for c in sent if c.kind == "all_reduce"]
    assert sum(c.bytes_per_worker for c in sums) == 2 * 7 / 8 * 12 * 4
    assert all(any("cond" in part for part in c.path) for c in sums)
