"""Methods compose with optax: chain, masked, partition, inject_hyperparams, schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from tests.cases import CASES, FEW, FRAME, Case, rows
from tests.workers import aggregate, flat, gradients, mesh_of, of_one_worker, one_leaf


@pytest.mark.parametrize("case", rows(CASES, FRAME), ids=repr)
def test_chain(case: Case) -> None:
    updates = one_leaf()
    alone = flat(aggregate(case.make(), updates))
    scaled = flat(aggregate(optax.chain(case.make(), optax.scale(-0.5)), updates))
    np.testing.assert_array_equal(scaled, (alone * np.float32(-0.5)))


@pytest.mark.parametrize("case", rows(CASES, FEW), ids=repr)
def test_masked_and_partition(case: Case) -> None:
    updates = {"bias": one_leaf(1), "kernel": one_leaf()}
    mask = {"bias": False, "kernel": True}
    rest = {name: not used for name, used in mask.items()}
    both = optax.chain(optax.masked(case.make(), mask), optax.masked(jaxcomm.mean(), rest))
    labels = {name: "coded" if used else "exact" for name, used in mask.items()}
    parted = optax.partition({"coded": case.make(), "exact": jaxcomm.mean()}, labels)
    for tx in (both, parted):
        results = aggregate(tx, updates)
        exact = np.asarray(updates["bias"]).mean(axis=0)
        np.testing.assert_allclose(results["bias"][0], exact, rtol=1e-5, atol=1e-6)
        # Under the same path, by which coins are drawn.
        alone = aggregate(case.make(), {"kernel": updates["kernel"]})
        np.testing.assert_array_equal(results["kernel"], alone["kernel"])


@pytest.mark.parametrize("case", rows(CASES, FEW), ids=repr)
def test_injected_hyperparameters_and_schedules(case: Case) -> None:
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    build = optax.inject_hyperparams(lambda rate: optax.chain(case.make(), optax.sgd(rate)))
    tx, plain = build(rate=schedule), optax.chain(case.make(), optax.sgd(schedule))
    params = of_one_worker(gradients(2))
    loss = lambda p, b: sum(jnp.sum(x**2) for x in jax.tree.leaves(p)) * jnp.mean(b)  # noqa: E731
    outcomes = []
    on_mesh, simulated = jaxcomm.make_step(loss, tx, mesh_of(2)), jaxcomm.simulate(loss, plain, 2)
    for each, workers, step in ((tx, mesh_of(2), on_mesh), (plain, 2, simulated)):
        own = jax.tree.map(jnp.copy, params)
        state = jaxcomm.init(each, own, workers)
        for _ in range(3):
            own, state, _ = step(own, state, jnp.full(2, 0.1))
        outcomes.append(own)
    for left, right in zip(*map(jax.tree.leaves, outcomes), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6)
