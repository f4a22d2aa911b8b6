"""Every method on every kind of mesh: as simulated, step by step, in a scan under jit, counted."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from tests.cases._gossip import GossipCase, gossip_rows
from tests.gossip.workers import start, steps
from tests.slow import slow
from tests.workers import meshes_of, trained_by_hand, trained_by_steps

# One worker sends nothing, whatever the method: rows with memory, with masses, and without.
ROWS = [
    (case, kind, workers)
    for kind, workers in ((AxisType.Explicit, 8), (AxisType.Auto, 8), (AxisType.Explicit, 1))
    for case in gossip_rows(8)
    if workers > 1 or case.name in {"dpsgd", "choco_sgd", "overlap_sgp"}
]
COUNT = 4


def loss(x: jax.Array, target: jax.Array) -> jax.Array:
    return 0.5 * jnp.sum((x - target[0]) ** 2)


def prepared(case: GossipCase, workers: int, where: Any) -> tuple[Any, Any, Any]:
    """`(step, params, state)` there."""
    tx = optax.chain(optax.sgd(0.1), case.make(workers))
    params = jaxcomm.PerWorker({"data": jnp.asarray(start(workers))})
    make = jaxcomm.simulate if where == workers else jaxcomm.make_step
    return make(loss, tx, where, donate=False), params, jaxcomm.init(tx, params, where)


@functools.cache
def simulated(case: GossipCase, workers: int) -> np.ndarray:
    step, params, state = prepared(case, workers, workers)
    for batch in steps(COUNT, workers):
        params, state, _ = step(params, state, batch)
    return np.asarray(params.per_worker["data"])


@pytest.mark.parametrize(("case", "kind", "workers"), ROWS, ids=repr)
def test_a_mesh_of_any_kind(case: GossipCase, kind: AxisType, workers: int) -> None:
    mesh = jax.make_mesh((workers,), ("data",), axis_types=(kind,), devices=jax.devices()[:workers])
    step, params, state = prepared(case, workers, mesh)
    first, *rest = steps(COUNT, workers)
    sent = jaxcomm.wire.account(step, params, state, first).collectives
    assert ("ppermute" in {c.kind for c in sent}) == (workers > 1)
    params, state, metrics = step(params, state, first)
    np.testing.assert_allclose(
        metrics["loss"], np.mean(0.5 * np.sum((start(workers) - first) ** 2, axis=1)), rtol=1e-5
    )

    @jax.jit
    def run(params: Any, state: Any, batches: jax.Array) -> Any:
        body = lambda carry, batch: (step(*carry, batch)[:2], None)  # noqa: E731
        return jax.lax.scan(body, (params, state), batches)[0]

    params, _ = run(params, state, np.stack(rest))
    np.testing.assert_allclose(
        params.per_worker["data"], simulated(case, workers), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("checked", [True, slow(False)])
@pytest.mark.parametrize("case", gossip_rows(8), ids=repr)
def test_a_scan_equals_single_steps(case: GossipCase, checked: bool) -> None:
    """`tx.init` and the loop are inside `jax.shard_map`, unchecked with plain `jax.grad`."""
    tx = optax.chain(jaxcomm.per_worker(optax.sgd(0.1, momentum=0.5)), case.make(8))
    params, batches, mesh = jnp.ones(12), steps(6, 8), meshes_of(8)[0 if checked else 1]
    found = trained_by_hand(tx, params, batches, mesh, differ=True, checked=checked)
    expected = trained_by_steps(tx, params, batches, mesh, differ=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
