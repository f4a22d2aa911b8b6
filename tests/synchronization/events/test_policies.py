"""Every policy does what its equations say, event by event, and counts its messages."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcomm.synchronization import deterministic, events
from tests.slow import slow
from tests.synchronization.events.problem import vector
from tests.synchronization.events.rows import REPLAYED, Row
from tests.synchronization.events.simulated import run_named, run_of


@pytest.mark.parametrize("row", REPLAYED, ids=repr)
def test_a_policy_equals_its_oracle(row: Row) -> None:
    run = run_of(row)
    for field in ("worker", "number", "staleness"):
        expected = [getattr(event, field) for event in run.happened]
        assert np.asarray(getattr(run.records, field)).tolist() == expected, field
    seconds = [event.seconds for event in run.happened]
    np.testing.assert_allclose(run.records.seconds, seconds, rtol=1e-6)
    messages = np.stack([np.asarray(x) for x in run.records.sent], axis=1)
    assert messages.tolist() == [[*event.messages] for event in run.happened]
    np.testing.assert_allclose(run.model, run.rule.x, rtol=2e-4, atol=2e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(run.model))


@pytest.mark.parametrize(
    "policy",
    [
        events.easgd(optax.sgd(1.0), elasticity=0.25),
        slow(events.eamsgd(1.0, 0.0, elasticity=0.25)),
    ],
)
def test_elastic_steps_follow_gradients(policy: Any) -> None:
    """Algorithm 1 of the paper begins with it, so that its center has .25 after one gradient."""
    loop = events.event_loop(
        policy, lambda x, event: (x, jnp.full((), -1.0)), deterministic([1.0]), workers=1
    )
    progress = loop.start(jnp.float32(0))
    for center in (0, 0.25, 0.625, 1.0625):
        progress, _ = loop.run(progress, 1)
        assert loop.model(progress) == center


def test_late_gradients_are_dropped_and_counted() -> None:
    run = run_named("backup_workers")
    assert run.progress.policy.dropped == run.rule.dropped > 0
    steps, uses = np.unique([step for step, _ in run.rule.used], return_counts=True)
    assert (uses[:-1] == 3).all() and steps[-1] == run.progress.policy.step


@pytest.mark.parametrize("name", ["laq", "lag_ps", slow("lag_wk")])
def test_the_server_keeps_the_sum_of_the_last_uploads(name: str) -> None:
    run = run_named(name)
    state = run.progress.policy
    own = run.progress.own
    last = vector(own if name == "lag_ps" else own.upload.last)
    total = vector(jax.tree.map(lambda x: x[None], state.total))[0]
    np.testing.assert_allclose(total, last.sum(axis=0), atol=1e-5)
    np.testing.assert_allclose(last, run.rule.uploads, atol=1e-4)
    uploads, events = int(run.records.sent.uploads.sum()), len(run.happened)
    assert 8 < uploads <= events and (uploads < events or name == "lag_ps")


def test_every_displacement_is_merged_once() -> None:
    run = run_named("decoupled_diloco")
    state = run.progress.policy
    assert state.merges == len(run.rule.sizes) and {2, 3} <= {*run.rule.sizes}
    own = run.progress.own
    np.testing.assert_allclose(vector(own.params), run.rule.own, atol=1e-4)
    np.testing.assert_allclose(vector(own.base), run.rule.base, atol=1e-4)
    waiting = sum(weight for _, weight, _ in run.rule.waiting)
    np.testing.assert_allclose(state.weight, waiting)
