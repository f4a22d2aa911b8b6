"""Methods compose with optax: chain, masked, partition, inject_hyperparams, schedules."""

import chex
import numpy as np
import optax
import pytest

import jaxcomm
from tests.cases import CASES, Case
from tests.laws.steps import SCHEDULE, scheduled, start_and_targets
from tests.workers import aggregate, flat, gradients, mesh_of, one_leaf, towards


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_chain(case: Case) -> None:
    updates = gradients(3)
    alone = flat(aggregate(case.make(), updates))
    scaled = flat(aggregate(optax.chain(case.make(), optax.scale(-0.5)), updates))
    np.testing.assert_array_equal(scaled, (alone * np.float32(-0.5)))


@pytest.mark.parametrize("case", CASES, ids=repr)
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
        # Under the same path, by which keys are drawn.
        alone = aggregate(case.make(), {"kernel": updates["kernel"]})
        np.testing.assert_array_equal(results["kernel"], alone["kernel"])


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_injected_hyperparameters_and_schedules(case: Case) -> None:
    """On a mesh, against a schedule that is not injected, simulated."""
    tx, step = scheduled(case)
    plain = optax.chain(case.make(), optax.sgd(SCHEDULE))
    simulated = jaxcomm.simulate(towards, plain, 2, donate=False)
    params, targets = start_and_targets()
    outcomes = []
    for each, workers, run in ((tx, mesh_of(2), step), (plain, 2, simulated)):
        own, state = params, jaxcomm.init(each, params, workers)
        for _ in range(3):
            own, state, _ = run(own, state, targets)
        outcomes.append(own)
    chex.assert_trees_all_close(*outcomes, rtol=1e-6, atol=1e-6)
