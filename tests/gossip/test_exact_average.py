"""An exact average now and then, around every method: what it keeps, sends and leaves behind."""

import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import gossip
from tests.cases._gossip import GOSSIP, GossipCase, gossip_rows
from tests.gossip.test_programs import program
from tests.gossip.workers import start, steps, trajectory

EVERY, COUNT = 3, 12
ALL = {case.name for case in GOSSIP}


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", gossip_rows(8, ALL), ids=repr)
def test_every_method_is_set_to_its_exact_mean_and_goes_on_rightly(case: GossipCase) -> None:
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


def test_push_sum_of_unequal_masses() -> None:
    """The mean of 10, 0, 0, 0, and masses that are 1 again."""
    graph = nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)])
    tx = optax.chain(optax.sgd(0.0), gossip.periodic_averaging(EVERY, gossip.sgp(graph, overlap=1)))
    params = jaxcomm.PerWorker({"data": jnp.array([10.0, 0, 0, 0])})
    state = jaxcomm.init(tx, params, 4)
    step = jaxcomm.simulate(lambda w, b: jnp.sum(w * 0), tx, 4)
    for number in range(1, 7):
        params, state, _ = step(params, state, jnp.zeros(4))
        mass = state[1].gossip.own.per_worker["data"].mass
        if number % EVERY:
            assert np.ptp(mass) > 0.1
        else:
            np.testing.assert_allclose(params.per_worker["data"], np.full(4, 2.5), rtol=1e-6)
            np.testing.assert_allclose(mass, np.ones(4), rtol=1e-6)


PRESENT = np.array([True, True, False, True, True, False, True, True])


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", [row for row in gossip_rows(8) if row.values[0].absence], ids=repr)
def test_who_is_absent_is_not_averaged(case: GossipCase) -> None:
    x, nothing = start(8), np.zeros((EVERY, 8, 12), np.float32)
    exact = gossip.periodic_averaging(EVERY, case.make(8))
    found, _ = trajectory(exact, x, nothing, present=jnp.asarray(PRESENT))
    np.testing.assert_array_equal(found[-1][~PRESENT], x[~PRESENT])
    together = x[PRESENT].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(found[-1][PRESENT], np.tile(together, (6, 1)), atol=1e-6)


def test_it_can_be_asked_for_in_any_step() -> None:
    x, updates = start(8), steps(1, 8)
    for asked in (True, False):
        found, _ = trajectory(gossip.dpsgd(gossip.ring(8)), x, updates, exact=jnp.array(asked))
        assert (np.ptp(found[0], axis=0).max() < 1e-6) == asked


def test_it_sends_in_its_steps_alone() -> None:
    run, args = program(gossip.periodic_averaging(EVERY, gossip.dpsgd(gossip.ring(8))))
    sent = jaxcomm.wire.account(run, *args).collectives
    sums = [c for c in sent if c.primitive == "all_reduce"]
    assert sum(c.bytes_per_worker for c in sums) == 2 * 7 / 8 * 12 * 4
    assert all(any("cond" in part for part in c.path) for c in sums)
