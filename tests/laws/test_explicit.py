"""Leaves sharded over an Explicit axis are averaged as over an Auto axis, and stay sharded."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcomm
from tests.cases import CASES, Case

SPECS = {"bias": PartitionSpec("model"), "kernel": PartitionSpec(None, "model")}


def mesh_of(kind: AxisType) -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, kind))


def program(tx: Any, mesh: Mesh) -> Callable[..., Any]:
    """`gradients [2, ...] -> parameters`, after one step down from ones."""

    def local(updates: Any, params: Any) -> Any:
        own = jax.tree.map(lambda x: x[0], updates)
        change, _ = tx.update(own, tx.init(params), params)
        if mesh == mesh_of(AxisType.Explicit):
            assert {k: jax.typeof(x).sharding.spec for k, x in change.items()} == SPECS
        return optax.apply_updates(params, change)

    whole = PartitionSpec()
    return jax.shard_map(
        local,
        mesh=mesh,
        axis_names={"data"},
        in_specs=(PartitionSpec("data"), whole),
        out_specs=whole,
    )


def given(mesh: Mesh) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    updates = {"bias": rng.normal(size=(2, 8)), "kernel": rng.normal(size=(2, 3, 8))}

    def put(x: np.ndarray, *spec: Any) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.device_put(jnp.asarray(x, jnp.float32), sharding)

    return (
        {name: put(x, None, *SPECS[name]) for name, x in updates.items()},
        {name: put(np.ones(x.shape[1:]), *SPECS[name]) for name, x in updates.items()},
    )


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_method_accepts_sharded_leaves(case: Case) -> None:
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        jax.eval_shape(program(case.make(), mesh), *given(mesh))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [jaxcomm.global_qsgd(), jaxcomm.shard_local(jaxcomm.global_qsgd(), SPECS)],
    ids=["whole", "shard_local"],
)
def test_auto_and_explicit_axes_give_the_same_parameters(tx: Any) -> None:
    results = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(kind)
        with jax.set_mesh(mesh):
            results.append(jax.jit(program(tx, mesh))(*given(mesh)))
    automatic, explicit = results
    for name in SPECS:
        np.testing.assert_allclose(automatic[name], explicit[name], rtol=1e-6)
