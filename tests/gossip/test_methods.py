"""Laws of gossip, of every row of the table: its equations, what it keeps, and absent workers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm import gossip
from tests.cases._gossip import GossipCase, gossip_rows
from tests.gossip.workers import initial_of_start, matrices_of, start, steps, trajectory
from tests.mutants import Mutant

STEPS = 1000
FEW = 12  # Beyond these, a coordinate is kept or not by the last bit.
LOST = 3, -1  # The step and the worker of the update that is not finite.


@pytest.mark.parametrize(
    ("case", "workers"),
    [(case, workers) for workers in (8, 1, 2, 3, 16) for case in gossip_rows(workers)],
    ids=repr,
)
def test_against_numpy_and_what_is_kept(case: GossipCase, workers: int) -> None:
    check(case, workers)


@functools.cache
def first_steps(case: GossipCase, workers: int, lost: bool = False) -> np.ndarray:
    """What the equations say of them, in NumPy, with or without the update that is lost."""
    updates = steps(FEW, workers)
    if lost:
        updates[LOST] = 0
    return case.oracle(start(workers), updates, matrices_of(case.mixing(workers), FEW))


def check(case: GossipCase, workers: int, mutant: Mutant | None = None) -> None:
    x, updates, tx = start(workers), steps(STEPS, workers), case.make(workers)
    first = initial_of_start(tx, workers)
    found, state = trajectory(tx, x, updates, mutant, first)
    np.testing.assert_allclose(found[:FEW], first_steps(case, workers), rtol=0, atol=2e-6)
    moved = updates[: STEPS - case.late].astype(np.float64).mean(axis=1).sum(axis=0)
    kept = x.astype(np.float64).mean(axis=0) + moved
    if case.sums:
        memory = state.own.per_worker["data"]
        (mass,) = np.asarray(memory.mass, np.float64)[None]
        total = (mass[:, None] * found[-1]).sum(axis=0)
        for (in_transit,), late in memory.in_transit:
            total = total + np.asarray(in_transit, np.float64).sum(axis=0)
            mass = mass + np.asarray(late, np.float64)
        np.testing.assert_allclose(mass.sum(), workers, rtol=1e-5)
        assert (mass > 0).all()
        np.testing.assert_allclose(total / workers, kept, rtol=0, atol=1e-4)
    else:
        np.testing.assert_allclose(found[-1].mean(axis=0), kept, rtol=0, atol=case.drift)
    for value in (np.nan, np.inf):  # The worker leaves its own step out, and mixes.
        updates[LOST][5] = value
        found, spoilt = trajectory(tx, x, updates, mutant, first)
        expected = first_steps(case, workers, lost=True)
        np.testing.assert_allclose(found[:FEW], expected, rtol=0, atol=2e-6)
        skipped_steps = getattr(spoilt, "gossip", spoilt).skipped_steps.per_worker["data"]
        np.testing.assert_array_equal(skipped_steps, np.arange(workers) == workers - 1)


@pytest.mark.slow
def test_two_axes_equal_one() -> None:
    """8 workers with targets of their own, of which all draw the same matchings."""
    axes, sizes = ("dcn", "ici"), {"dcn": 2, "ici": 4}
    mesh = jax.make_mesh((2, 4), axes, axis_types=(AxisType.Auto,) * 2)

    def trained(workers: Any, make: Any, axes: Any) -> np.ndarray:
        plan = gossip.matcha_plan(gossip.ring(8), 0.5)
        tx = optax.chain(optax.sgd(0.1), gossip.matcha(plan, axis_name=axes))
        params = jaxcomm.replicate(jnp.float32(3), workers, axis_name=axes)
        state = jaxcomm.init(tx, params, workers, axis_name=axes)
        step = make(lambda x, y: jnp.mean((x - y) ** 2), tx, workers, axis_name=axes)
        for _ in range(4):
            params, state, _ = step(params, state, jnp.arange(8.0))
        return np.asarray(*params.per_worker.values())

    one = trained(8, jaxcomm.simulate, "data")
    np.testing.assert_array_equal(one, trained(sizes, jaxcomm.simulate, axes))
    np.testing.assert_allclose(one, trained(mesh, jaxcomm.make_step, axes), rtol=1e-6)


@pytest.mark.parametrize("case", gossip_rows(8), ids=repr)
def test_skip_nonfinite_skips_on_all_workers(case: GossipCase) -> None:
    """As if the step had not been: parameters, memory, keys and turns."""
    tx = jaxcomm.skip_nonfinite(optax.chain(optax.identity(), case.make(8)))
    updates, at = steps(7, 8), LOST[0]
    updates[LOST][5] = np.nan
    found, state = trajectory(tx, start(8), updates[:-1])
    expected, after = trajectory(tx, start(8), np.delete(updates, at, axis=0))
    np.testing.assert_array_equal(found[at], found[at - 1])
    np.testing.assert_array_equal(np.delete(found, at, axis=0), expected[:-1])
    assert (state.skipped_steps, after.skipped_steps) == (1, 0)


def test_diagnostics_count_skipped_updates() -> None:
    tx, updates = gossip.dpsgd(gossip.ring(8), diagnostics=True), steps(6, 8)
    updates[2, 0], updates[2, 3, 5] = np.inf, np.nan
    weight = np.ones(8, np.float32)
    for expected, weight[[0, 3]] in ((2, 1), (0, 0)):  # Means over no samples are no loss.
        state = trajectory(tx, start(8), updates, weight=jnp.asarray(weight))[1]
        assert state.diagnostics["skipped_steps"] == expected


def test_unrepresentable_updates_are_skipped() -> None:
    """Steps of float16 beyond 65504: by itself, by its weight, and added to parameters."""
    updates, first = np.zeros((1, 4, 3), np.float16), np.zeros((4, 3), np.float16)
    updates[0, :, 1] = 6.5e4, 3e4, 4e4, 4e4
    first[[0, 2], 1] = 3e4
    # Relative to neighbors: 0.59, 2.3, 0.17, 0.22.
    tx, weight = gossip.dpsgd(gossip.ring(4)), jnp.array([1.0, 4.0, 0.25, 0.1])
    found, state = trajectory(tx, first, updates, weight=weight)
    np.testing.assert_array_equal(state.skipped_steps.per_worker["data"], [1, 1, 0, 0])
    assert np.isfinite(found).all()
