"""`jax.shard_map`, checked or not, and `jax.vmap` agree, bit for bit where sums are integer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomm
from jaxcomm import _noise
from tests.cases import CASES, Case
from tests.laws.steps import (
    linear,
    meshes,
    momentum_sgd,
    of_linear,
    plain_gradients,
    start_of_linear,
)
from tests.workers import (
    aggregator,
    count,
    flat,
    gradients,
    initial,
)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_scan_equals_single_steps(case: Case, checked: bool) -> None:
    """`tx.init` and the loss are inside `jax.shard_map`, unchecked with plain `jax.grad`."""
    tx, mesh = momentum_sgd(case), meshes(4)[not checked]
    params, state, batch = start_of_linear(case)

    def gradient(params: Any, batch: jax.Array) -> Any:
        if checked:
            return jaxcomm.local_value_and_grad(linear)(params, batch)[1]
        return jax.grad(linear)(params, batch)

    def train(params: Any, batch: jax.Array) -> Any:
        def body(carry: Any, _: None) -> Any:
            params, state = carry
            updates, state = tx.update(gradient(params, batch), state, params)
            return (optax.apply_updates(params, updates), state), None

        (own, _), _ = jax.lax.scan(body, (params, tx.init(params)), length=3)
        return jax.tree.map(lambda x: x[None], own)

    whole, own = PartitionSpec(), PartitionSpec("data")
    run = jax.shard_map(train, mesh=mesh, in_specs=(whole, own), out_specs=own, check_vma=checked)
    placed = jax.device_put((params, batch), tuple(NamedSharding(mesh, x) for x in (whole, own)))
    found = jax.jit(run)(*placed)
    given = plain_gradients if getattr(case.make(), "kind", "") == "loss" else None
    for _ in range(3):
        params, state, _ = of_linear(case, False, given)(params, state, batch)
    for name, expected in params.items():
        for replica in found[name]:
            np.testing.assert_allclose(replica, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("inner", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_two_axes_equal_one(case: Case, inner: int) -> None:
    workers = 2 * inner
    updates = gradients(workers)
    mesh = jax.make_mesh(
        (2, inner),
        ("dcn", "ici"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[:workers],
    )
    tx, axes = case.make(("dcn", "ici")), ("dcn", "ici")
    one = jax.tree.map(lambda x: x[0], updates)

    def as_over_data(state: object) -> object:
        """With keys whose draws over these axes equal those over the one axis."""
        return jax.tree.map(
            lambda x: (
                _noise.placed_key(_noise.placed_key(x, "data", one), axes, one)
                if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
                else x
            ),
            state,
        )

    state = as_over_data(jaxcomm.init(tx, one, mesh))

    def on_mesh(updates: object, state: object) -> object:
        local = jax.tree.map(lambda x: x[0], updates)
        return tx.update(local, state)[0]

    specs = (PartitionSpec(axes), jaxcomm.state_specs(state))
    result = jax.jit(jax.shard_map(on_mesh, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))(
        updates, state
    )
    tolerance = 0 if case.integer_sum else 1e-5
    mine = flat(jax.tree.map(lambda x: x[None], result))
    single = case.make("data")
    expected, _ = aggregator(single, count(updates), "vmap")(
        updates, initial(single, updates, "vmap"), jnp.ones(workers)
    )
    np.testing.assert_allclose(mine, flat(expected)[:1], rtol=0, atol=tolerance)
    if inner > 2:
        return  # Two by two simulated workers are enough.
    nested = jax.vmap(
        jax.vmap(lambda x: tx.update(x, as_over_data(tx.init(x)))[0], axis_name="ici"),
        axis_name="dcn",
    )
    simulated = jax.jit(nested)(jax.tree.map(lambda x: x.reshape(2, inner, *x.shape[1:]), updates))
    simulated = jax.tree.map(lambda x: x.reshape(workers, *x.shape[2:]), simulated)
    np.testing.assert_allclose(flat(simulated), np.tile(mine, (workers, 1)), atol=tolerance, rtol=0)
