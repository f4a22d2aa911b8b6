"""A step with NaN is skipped by all workers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import gossip
from jaxcomm.synchronization import local_sgd
from jaxcomm.testing import AggregatorTrial
from tests.cases import CASES, Case
from tests.workers import flat, gradients


def bits(tree: object) -> list[np.ndarray]:
    keys = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(x) if keys(x) else x) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_skip_nonfinite_skips_on_all_workers_and_changes_nothing(case: Case) -> None:
    """Neither residuals nor keys; and the step is counted."""
    trial, updates = AggregatorTrial(jaxcomm.skip_nonfinite(case.make()), 4), gradients(4)
    _, state = trial.step(updates, trial.first(updates, "checked"), "checked")
    spoiled = {**updates, "kernel": updates["kernel"].at[2, 1, 1].set(np.nan)}
    results, after = trial.step(spoiled, state, "checked")
    assert (flat(results) == 0).all()
    assert (state.skipped_steps, after.skipped_steps) == (0, 1)
    for x, y in zip(bits(after.inner), bits(state.inner), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("method", ["local_sgd", "gossip"])
def test_per_worker_skipping_before_methods_of_all_workers(method: str) -> None:
    """All skip the step of one worker; its number is counted on each, and training goes on."""
    own = jaxcomm.per_worker(jaxcomm.skip_nonfinite(optax.sgd(0.5, momentum=0.5)))
    exchange = local_sgd(1) if method == "local_sgd" else gossip.dpsgd(gossip.ring(4))
    tx = optax.chain(own, exchange)
    step = jaxcomm.simulate(lambda w, x: jnp.mean(x @ w), tx, 4, donate=False)
    params = jaxcomm.replicate(jnp.ones(3), 4)
    rows = np.random.default_rng(0).normal(size=(3, 4, 3)).astype(np.float32)
    spoiled = rows[1].copy()
    spoiled[2] = np.nan
    with jax.numpy_dtype_promotion("standard"):
        before, state, _ = step(params, jaxcomm.init(tx, params, 4), rows[0])
        skipped, after, _ = step(before, state, spoiled)
        moved, _, _ = step(skipped, after, rows[2])
    momentum, same = (s[0].per_worker["data"].inner for s in (state, after))
    assert jax.tree.structure(momentum) == jax.tree.structure(same)
    for x, y in zip(bits(momentum), bits(same), strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(after[0].per_worker["data"].skipped_steps, [1] * 4)
    mean = [np.asarray(x.per_worker["data"]).mean(axis=0) for x in (before, skipped, moved)]
    np.testing.assert_allclose(mean[0], mean[1], rtol=1e-6)
    assert np.isfinite(mean[2]).all() and np.abs(mean[2] - mean[1]).min() > 1e-3
