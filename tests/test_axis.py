"""Mesh axes: local gradients, modes, gathers, and mistakes that are errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import jaxcomm
from jaxcomm import _axis, _collectives
from tests.slow import slow
from tests.workers import mesh_of

MESH = mesh_of(4)
REPLICATED = PartitionSpec()
W = jnp.arange(3.0)
X = jnp.arange(12.0).reshape(4, 3)


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ w) ** 2)


def on_mesh(
    fn: Any, *args: Any, out: Any = REPLICATED, check: bool = True, mesh: Any = MESH
) -> Any:
    specs = (PartitionSpec(), PartitionSpec(mesh.axis_names))[: len(args)]
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check)
    return jax.jit(mapped)(*args)


def test_arguments_of_a_loss_with_a_local_gradient() -> None:
    def loss(w: jax.Array, x: jax.Array, scale: Any, **rest: Any) -> jax.Array:
        assert [*rest] == ["name", "fn", "absent"] and rest["absent"] is None
        return rest["fn"](w * x) * scale[rest["name"]]

    def gradient(x: jax.Array) -> jax.Array:
        local = jaxcomm.local_value_and_grad(loss)
        return local(jnp.float32(1), x, {"two": 2}, name="two", fn=jnp.square, absent=None)[1]

    gradients = jax.vmap(gradient, axis_name="data")(jnp.arange(3.0))
    np.testing.assert_array_equal(gradients, [0, 4, 16])


@pytest.mark.parametrize("check", [True, False])
def test_gradients_are_local_in_shard_map(check: bool) -> None:
    def gradients(w: jax.Array, x: jax.Array) -> jax.Array:
        return jaxcomm.local_value_and_grad(loss)(w, x)[1][None]

    local = on_mesh(gradients, W, X, out=PartitionSpec("data"), check=check)
    by_hand = np.stack([2 * (x @ W) * x for x in np.asarray(X)])
    np.testing.assert_allclose(local, by_hand, rtol=1e-6)


def test_gradients_are_local_under_vmap() -> None:
    gradient = lambda x: jaxcomm.local_value_and_grad(loss)(W, x[None])[1]  # noqa: E731
    local = jax.vmap(gradient, axis_name="data")(X)
    np.testing.assert_allclose(local, [2 * (x @ W) * x for x in np.asarray(X)], rtol=1e-6)


def test_aux_comes_along() -> None:
    def with_aux(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return loss(w, x), jnp.sum(x)

    def both(w: jax.Array, x: jax.Array) -> jax.Array:
        (_, aux), _ = jaxcomm.local_value_and_grad(with_aux, has_aux=True)(w, x)
        return lax.psum(aux, "data")

    assert on_mesh(both, W, X) == X.sum()


def test_over_one_of_two_axes_gradients_are_summed_over_the_other() -> None:
    mesh = jax.make_mesh((2, 2), ("dcn", "ici"), axis_types=(AxisType.Auto,) * 2)

    def gradient(w: jax.Array, x: jax.Array) -> jax.Array:
        _, g = jaxcomm.local_value_and_grad(loss, axis_name="dcn")(w, x)
        return jaxcomm.mean("dcn").update(g, optax.EmptyState())[0]

    result = on_mesh(gradient, W, X, mesh=mesh)
    np.testing.assert_allclose(result, np.sum([2 * (x @ W) * x for x in np.asarray(X)], 0) / 2)


AGGREGATORS = {
    "mean": jaxcomm.mean,
    "global_qsgd": jaxcomm.global_qsgd,
    "qsgd": jaxcomm.qsgd,
    "ring_mean": jaxcomm.ring_mean,
    "votes": jaxcomm.majority_vote,
}


@pytest.mark.parametrize("name", AGGREGATORS)
def test_a_gradient_that_is_summed_already_is_an_error(name: str) -> None:
    tx = AGGREGATORS[name]()

    def update(w: jax.Array, x: jax.Array) -> jax.Array:
        return tx.update({"w": jax.grad(loss)(w, x)}, tx.init({"w": w}))[0]

    with pytest.raises(
        ValueError, match=r"\['w'\] does not vary over \['data'\].*local_value_and_grad"
    ):
        on_mesh(update, W, X)
    with pytest.raises(ValueError, match="The update at the root does not vary"):
        on_mesh(lambda w, x: tx.update(jax.grad(loss)(w, x), tx.init(w))[0], W, X)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_two_aggregators_in_a_row_are_an_error(name: str) -> None:
    tx = optax.chain(AGGREGATORS[name](), jaxcomm.mean())
    with pytest.raises(ValueError, match="summed already"):
        on_mesh(lambda w, x: tx.update(x[0], tx.init(w))[0], W, X)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_an_update_that_varies_over_another_axis_is_an_error(name: str) -> None:
    mesh = jax.make_mesh((2, 2), ("dcn", "ici"), axis_types=(AxisType.Auto,) * 2)
    tx = AGGREGATORS[name]("dcn")
    with pytest.raises(ValueError, match=r"varies over \['ici'\] as well"):
        on_mesh(lambda w, x: tx.update(x[0], tx.init(w))[0], W, X, mesh=mesh)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_outside_of_any_mesh_is_an_error(name: str) -> None:
    tx = AGGREGATORS[name]("workers")
    with pytest.raises(ValueError, match="`axis_name`='workers' is not bound here"):
        tx.update(W, tx.init(W))


def test_modes() -> None:
    seen = {}

    def look(key: str) -> Any:
        def fn(x: jax.Array) -> jax.Array:
            seen[key] = _axis.mode("data")
            return x

        return fn

    spec = PartitionSpec("data")
    for check, name in ((True, "checked"), (False, "unchecked")):
        jax.shard_map(look(name), mesh=MESH, in_specs=spec, out_specs=spec, check_vma=check)(X)
    jax.vmap(look("vmap"), axis_name="data")(X)
    jax.pmap(look("pmap"), axis_name="data", devices=jax.devices()[:4])(X)
    assert seen == {
        "checked": "checked",
        "unchecked": "unchecked",
        "vmap": "vmap",
        "pmap": "unchecked",
    }


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.float16, jnp.float32, jnp.int8]
)
def test_gathers_are_exact_and_narrow(dtype: Any) -> None:
    given = X.astype(dtype)

    def gather(x: jax.Array) -> jax.Array:
        return _collectives.gather(x[0], "data")

    mapped = jax.jit(
        jax.shard_map(gather, mesh=MESH, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
    )
    np.testing.assert_array_equal(mapped(given).astype(jnp.float32), given.astype(jnp.float32))
    hlo = mapped.lower(given).compile().as_text()
    (line,) = [line for line in hlo.splitlines() if " all-gather(" in line]
    bits = 8 * jnp.dtype(dtype).itemsize
    assert any(f"{kind}{bits}[" in line.split(" all-gather(")[0] for kind in "usf")


def test_gathers_over_two_axes_are_in_the_order_of_the_index() -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    axes = ("a", "b")

    def gather(x: jax.Array) -> jax.Array:
        return _collectives.gather(_axis.index(axes) + x[0].astype(jnp.int32) * 0, axes)

    one = jax.shard_map(gather, mesh=mesh, in_specs=PartitionSpec(axes), out_specs=PartitionSpec())(
        X
    )
    two = jax.vmap(jax.vmap(gather, axis_name="b"), axis_name="a")(X.reshape(2, 2, 1, 3))[0, 0]
    np.testing.assert_array_equal(one[:, 0], np.arange(4))
    np.testing.assert_array_equal(two[:, 0], np.arange(4))


def test_shifts_go_to_the_next_worker_whatever_the_axes() -> None:
    axes = ("a", "b", "c")
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)
    given = jnp.arange(8.0, dtype=jnp.bfloat16)

    def shift(x: jax.Array) -> jax.Array:
        return _collectives.shift(x, axes)

    spec = PartitionSpec(axes)
    for check in (True, False):
        moved = jax.shard_map(shift, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check)
        np.testing.assert_array_equal(
            jax.jit(moved)(given).astype(jnp.float32), np.roll(np.arange(8), 1)
        )
    nested = shift
    for name in reversed(axes):
        nested = jax.vmap(nested, axis_name=name)
    simulated = jax.jit(nested)(given.reshape(2, 2, 2)).ravel()
    np.testing.assert_array_equal(simulated.astype(jnp.float32), np.roll(np.arange(8), 1))
    one = jax.vmap(lambda x: _collectives.shift(x, "data"), axis_name="data")
    for workers in (1, 2, 5):
        np.testing.assert_array_equal(one(jnp.arange(workers)), np.roll(np.arange(workers), 1))


@pytest.mark.parametrize("distance", [1, slow(2), 4])
def test_swaps_are_between_pairs_whatever_the_axes(distance: int) -> None:
    # Of 6 workers, some have no partner.
    given = jnp.arange(6.0, dtype=jnp.bfloat16)
    expected = [w ^ distance if w ^ distance < 6 else w for w in range(6)]
    axes = ("a", "b")
    mesh = jax.make_mesh((2, 3), axes, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:6])
    spec = PartitionSpec(axes)
    swap = lambda x: _collectives.swap(x, axes, distance)  # noqa: E731
    for check in (True, False):
        moved = jax.shard_map(swap, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check)
        np.testing.assert_array_equal(jax.jit(moved)(given).astype(jnp.float32), expected)
    nested = jax.vmap(jax.vmap(swap, axis_name="b"), axis_name="a")
    simulated = nested(given.reshape(2, 3)).ravel()
    np.testing.assert_array_equal(simulated.astype(jnp.float32), expected)
    one = jax.vmap(lambda x: _collectives.swap(x, "data", distance), axis_name="data")
    np.testing.assert_array_equal(one(given).astype(jnp.float32), expected)
