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
from jaxcomm import _axis, _collectives, local_value_and_grad
from tests.aggregation.runs import refuse
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
        local = local_value_and_grad(loss)
        return local(jnp.float32(1), x, {"two": 2}, name="two", fn=jnp.square, absent=None)[1]

    gradients = jax.vmap(gradient, axis_name="data")(jnp.arange(3.0))
    np.testing.assert_array_equal(gradients, [0, 4, 16])


def gradient(w: jax.Array, x: jax.Array) -> jax.Array:
    own: jax.Array = local_value_and_grad(loss)(w, x)[1]
    return own


OWN = np.stack([2 * (x @ W) * x for x in np.asarray(X)])


@pytest.mark.parametrize("check", [True, False])
def test_gradients_are_local_in_shard_map(check: bool) -> None:
    one = lambda w, x: gradient(w, x)[None]  # noqa: E731
    local = on_mesh(one, W, X, out=PartitionSpec("data"), check=check)
    np.testing.assert_allclose(local, OWN, rtol=1e-6)


def test_gradients_are_local_under_vmap() -> None:
    local = jax.vmap(lambda x: gradient(W, x[None]), axis_name="data")(X)
    np.testing.assert_allclose(local, OWN, rtol=1e-6)


def test_aux_is_returned() -> None:
    def with_aux(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return loss(w, x), jnp.sum(x)

    def both(w: jax.Array, x: jax.Array) -> jax.Array:
        (_, aux), _ = local_value_and_grad(with_aux, has_aux=True)(w, x)
        return lax.psum(aux, "data")

    assert on_mesh(both, W, X) == X.sum()


def test_over_one_of_two_axes_gradients_are_summed_over_the_other() -> None:
    mesh = jax.make_mesh((2, 2), ("dcn", "ici"), axis_types=(AxisType.Auto,) * 2)

    def gradient(w: jax.Array, x: jax.Array) -> jax.Array:
        _, g = local_value_and_grad(loss, axis_name="dcn")(w, x)
        return jaxcomm.mean("dcn").update(g, optax.EmptyState())[0]

    np.testing.assert_allclose(on_mesh(gradient, W, X, mesh=mesh), OWN.sum(axis=0) / 2)


def averaged(tx: Any, gradients: Any) -> Any:
    """One update of the gradients of `(w, x)`."""
    return lambda w, x: tx.update(gradients(w, x), tx.init(w))[0]


AGGREGATORS = [jaxcomm.mean, jaxcomm.majority_vote, slow(jaxcomm.global_qsgd), slow(jaxcomm.qsgd)]


@pytest.mark.parametrize("make", AGGREGATORS)
def test_mistakes_with_the_axes_of_a_gradient(make: Any) -> None:
    grad = jax.grad(loss)
    in_tree = lambda w, x: {"w": grad(w, x)}  # noqa: E731
    message = r"\['w'\] does not vary over \['data'\].*local_value_and_grad"
    refuse(message, lambda: on_mesh(averaged(make(), in_tree), W, X))
    refuse("The update at the root does not", lambda: on_mesh(averaged(make(), grad), W, X))
    twice = averaged(optax.chain(make(), jaxcomm.mean()), lambda w, x: x[0])
    refuse("summed already", lambda: on_mesh(twice, W, X))
    mesh = jax.make_mesh((2, 2), ("dcn", "ici"), axis_types=(AxisType.Auto,) * 2)
    one_axis = averaged(make("dcn"), lambda w, x: x[0])
    refuse(r"varies over \['ici'\] as well", lambda: on_mesh(one_axis, W, X, mesh=mesh))


def results_of(fn: Any, given: jax.Array, **axes: int) -> list[np.ndarray]:
    """Of each worker's number: on a mesh, checked and not, and simulated."""
    kinds, spec = (AxisType.Auto,) * len(axes), PartitionSpec(tuple(axes))
    devices = jax.devices()[: given.size]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)
    runs = [
        jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check)
        for check in (True, False)
    ]
    nested = lambda x: fn(x[None])[0]  # noqa: E731
    for name in reversed(axes):
        nested = jax.vmap(nested, axis_name=name)
    found = [jax.jit(run)(given) for run in runs]
    found.append(jax.jit(nested)(given.reshape(*axes.values())).ravel())
    return [np.asarray(x).astype(np.float32) for x in found]


def test_gathers_over_two_axes_are_in_the_order_of_the_index() -> None:
    """Worker i sums i times what it gathers from j at place j."""

    def weighted(x: jax.Array) -> jax.Array:
        every = _collectives.gather(x[0], ("a", "b"))
        own = _axis.index(("a", "b")).astype(jnp.float32)
        return jnp.sum(every * jnp.array([1.0, 10, 100, 1000]) * (own + 1))[None]

    for found in results_of(weighted, jnp.arange(1.0, 5), a=2, b=2):
        np.testing.assert_array_equal(found, 4321 * np.arange(1.0, 5))


@pytest.mark.parametrize("distance", [1, slow(2), 4])
def test_swaps_are_between_pairs_whatever_the_axes(distance: int) -> None:
    given = jnp.arange(6.0, dtype=jnp.bfloat16)  # Of 6 workers, some have no partner.
    expected = [w ^ distance if w ^ distance < 6 else w for w in range(6)]
    swap = lambda x: _collectives.swap(x, ("a", "b"), distance)  # noqa: E731
    for found in results_of(swap, given, a=2, b=3):
        np.testing.assert_array_equal(found, expected)
