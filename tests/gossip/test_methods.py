"""Laws of gossip, of every row of the table: its equations, what it keeps, and all ways to run."""

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
from tests.cases._gossip import GOSSIP, GossipCase, gossip_rows
from tests.gossip.workers import (
    initial,
    initial_of_start,
    matrices_of,
    on_mesh,
    start,
    steps,
    trajectory,
)
from tests.mutants import Mutant
from tests.slow import slow
from tests.workers import mesh_of

STEPS = 1000
FEW = 12  # Beyond these, a coordinate is kept or not by the last bit.
ALL = {case.name for case in GOSSIP}


@pytest.mark.parametrize("case", gossip_rows(8, ALL), ids=repr)
def test_against_numpy_and_what_is_kept(case: GossipCase) -> None:
    check(case, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "workers"),
    [(row.values[0], n) for n in (1, 2, 3, 16, 64) for row in gossip_rows(n)],
    ids=repr,
)
def test_any_number_of_workers(case: GossipCase, workers: int) -> None:
    check(case, workers)


@pytest.mark.parametrize("workers", [1, 3, slow(2), slow(16), slow(64)])
def test_the_first_row_with_any_number_of_workers(workers: int) -> None:
    check(GOSSIP[0], workers)


@functools.cache
def first_steps(case: GossipCase, workers: int) -> np.ndarray:
    """What the equations say of them, in NumPy."""
    matrices = matrices_of(case.mixing(workers), FEW)
    return case.oracle(start(workers), steps(STEPS, workers)[:FEW], matrices)


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
    updates[3, -1, 1] = np.nan
    _, spoilt = trajectory(tx, x, updates, mutant, first)
    skipped_steps = getattr(spoilt, "gossip", spoilt).skipped_steps.per_worker["data"]
    np.testing.assert_array_equal(skipped_steps, np.arange(workers) == workers - 1)


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", gossip_rows(4), ids=repr)
def test_devices_compute_what_the_simulator_does(case: GossipCase) -> None:
    x, updates = start(4), steps(4, 4)
    expected, _ = trajectory(case.make(4), x, updates)
    run, state, here = on_mesh(case.make(4), 4), initial(case.make(4), x, on_mesh=True), x
    for update in updates:
        here, state = run(jnp.asarray(here), state, jnp.asarray(update))
    np.testing.assert_allclose(here, expected[-1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", gossip_rows(8), ids=repr)
def test_workers_that_agree_stay_as_they_are(case: GossipCase) -> None:
    x = np.broadcast_to(start(1), (8, 12)).copy()
    found, _ = trajectory(case.make(8), x, np.zeros((STEPS, 8, 12), np.float32))
    np.testing.assert_allclose(found[-1], x, rtol=0, atol=2e-5 if case.sums else 1e-6)


def quadratic(x: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((x - target) ** 2)


def trained(tx: optax.GradientTransformation, workers: Any, make: Any, axes: Any) -> np.ndarray:
    """Where 8 workers with targets of their own are after 4 steps."""
    tx = optax.chain(optax.sgd(0.1), tx)
    params = jaxcomm.replicate(jnp.float32(3), workers, axis_name=axes)
    state = jaxcomm.init(tx, params, workers, axis_name=axes)
    step = make(quadratic, tx, workers, axis_name=axes)
    for _ in range(4):
        params, state, _ = step(params, state, jnp.arange(8.0))
    (found,) = params.per_worker.values()
    return np.asarray(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        slow(lambda axes: gossip.dpsgd(gossip.ring(8), axis_name=axes)),
        lambda axes: gossip.matcha(gossip.matcha_plan(gossip.ring(8), 0.5), axis_name=axes),
        slow(lambda axes: gossip.sgp(gossip.one_peer_exponential(8), axis_name=axes)),
    ],
    ids=["dpsgd", "matcha", "sgp"],
)
def test_two_axes_are_as_good_as_one(method: Any) -> None:
    axes, sizes = ("dcn", "ici"), {"dcn": 2, "ici": 4}
    mesh = jax.make_mesh((2, 4), axes, axis_types=(AxisType.Auto,) * 2)
    one = trained(method("data"), 8, jaxcomm.simulate, "data")
    np.testing.assert_array_equal(one, trained(method(axes), sizes, jaxcomm.simulate, axes))
    np.testing.assert_allclose(one, trained(method(axes), mesh, jaxcomm.make_step, axes), rtol=1e-6)


def test_a_step_that_is_left_out_does_not_mix() -> None:
    tx = jaxcomm.skip_nonfinite(optax.chain(optax.sgd(0.1), gossip.dpsgd(gossip.ring(4))))
    start = jaxcomm.PerWorker({"data": jnp.arange(4.0)})
    for workers, make in ((4, jaxcomm.simulate), (mesh_of(4), jaxcomm.make_step)):
        step = make(quadratic, tx, workers, donate=False)
        state = jaxcomm.init(tx, start, workers)
        same, state, _ = step(start, state, jnp.asarray([1, jnp.nan, 1, 1]))
        np.testing.assert_array_equal(same.per_worker["data"], jnp.arange(4.0))
        mixed, state, _ = step(same, state, jnp.ones(4))
        assert np.ptp(mixed.per_worker["data"]) < 3 and state.skipped_steps == 1
