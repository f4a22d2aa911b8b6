"""Per-worker state must match the number of workers; the error names both numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxcomm
from tests.cases import CASES, Case
from tests.cases._gossip import GOSSIP, GossipCase
from tests.workers import Mode, gradients, mesh_of

OTHERS = {
    "accumulate": jaxcomm.accumulate(jaxcomm.mean(), 2),
    "per_worker": jaxcomm.per_worker(optax.adam(1e-3)),
    "skip_nonfinite": jaxcomm.skip_nonfinite(jaxcomm.sparcml(density=0.5, granularity=1)),
}
MODES = pytest.mark.parametrize("mode", ["checked", "unchecked", "vmap"])


def differs(state: Any) -> list[bool]:
    return [bool(tuple(spec)) for spec in jax.tree.leaves(jaxcomm.state_specs(state))]


def update_on(tx: Any, workers: int, state: Any, mode: Mode, params: Any = None) -> None:
    """Traces an update by hand; each worker gets its part of the state, one row or more."""
    updates = gradients(workers) if params is None else params

    def one(x: Any, state: Any) -> Any:
        return tx.update(x, state, x)

    if mode == "vmap":
        leaves, treedef = jax.tree.flatten(state)
        axes = [0 if own else None for own in differs(state)]
        layout = [
            x if axis is None else x.reshape(workers, -1, *x.shape[1:])
            for x, axis in zip(leaves, axes, strict=True)
        ]
        mapped = jax.vmap(one, in_axes=(0, treedef.unflatten(axes)), axis_name="data")
        jax.eval_shape(mapped, updates, treedef.unflatten(layout))
        return

    def local(updates: Any, state: Any) -> Any:
        result, state = one(jax.tree.map(lambda x: x[0], updates), state)
        return jax.tree.map(lambda x: x[None], result), state

    data, specs = PartitionSpec("data"), jaxcomm.state_specs(state)
    on_mesh = jax.shard_map(
        local,
        mesh=mesh_of(workers),
        in_specs=(data, specs),
        out_specs=(data, specs),
        check_vma=mode == "checked",
    )
    jax.eval_shape(on_mesh, updates, state)


def check(tx: Any, of_eight: Any, mode: Mode, params: Any = None) -> None:
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), of_eight)
    if not any(differs(state)):
        update_on(tx, 4, state, mode, params)
        return
    with pytest.raises(ValueError, match="is for 8 workers, but there are 4 over 'data'"):
        update_on(tx, 4, state, mode, params)


def initial(tx: Any, params: Any) -> Any:
    first = jax.tree.map(lambda x: x[0], params)
    return jax.eval_shape(lambda first: jaxcomm.init(tx, first, 8), first)


@MODES
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_state_of_an_aggregator(case: Case, mode: Mode) -> None:
    check(case.make(), initial(case.make(), gradients(8)), mode)


@MODES
@pytest.mark.parametrize("name", OTHERS)
def test_state_of_a_wrapper(name: str, mode: Mode) -> None:
    check(OTHERS[name], initial(OTHERS[name], gradients(8)), mode)


@MODES
@pytest.mark.parametrize("case", GOSSIP, ids=repr)
def test_state_of_gossip(case: GossipCase, mode: Mode) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 12)), jnp.float32)
    state = jax.eval_shape(
        lambda x: jaxcomm.init(case.make(8), jaxcomm.PerWorker({"data": x}), 8), x
    )
    check(case.make(4), state, mode, x[:4])


def test_state_that_is_not_sharded_is_refused() -> None:
    tx = OTHERS["accumulate"]
    state, whole = initial(tx, gradients(8)), PartitionSpec()
    on_mesh = jax.shard_map(
        lambda g, state: tx.update(jaxcomm.local_params(g), state),
        mesh=mesh_of(8),
        in_specs=(PartitionSpec("data"), whole),
        out_specs=(whole, whole),
    )
    with pytest.raises(ValueError, match=r"\['mean'\]\['bias'\].*whole.*`jaxcomm.state_specs"):
        jax.eval_shape(on_mesh, gradients(8), state)
