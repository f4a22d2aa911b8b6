"""Aggregation inside the backward pass equals aggregation after it, bit for bit."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType

import jaxcomm
from jaxcomm import scheduling
from tests.cases import CASES, Case
from tests.scheduling import models
from tests.scheduling.models import STACKED, at_end, batch, loss, params, plain, train
from tests.slow import slow
from tests.workers import mesh_of, meshes_of

TOP_K = jaxcomm.top_k_sgd(ratio=0.25)


def wait_free(tx: Any = TOP_K, **options: Any) -> Any:
    return scheduling.wait_free(tx, stacked=STACKED, **options)


def check_equals_the_end(workers: Any, tx: Any, **options: Any) -> Any:
    inside = train(workers, tx, **options)
    after = train(workers, tx, gradients=at_end, **options)
    chex.assert_trees_all_equal(plain(inside), plain(after))
    return inside


@pytest.mark.parametrize(
    "workers", [mesh_of(4), *map(slow, [4, meshes_of(4)[1], mesh_of(1), mesh_of(8)])]
)
def test_equals_aggregation_after_the_backward_pass(workers: Any) -> None:
    check_equals_the_end(workers, wait_free())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_row_equals_aggregation_after_the_backward_pass(case: Case) -> None:
    try:
        tx = wait_free(case.make())
    except ValueError as error:
        assert "all gradients at once" in str(error) or case.name == "parallax"
        return
    check_equals_the_end(mesh_of(4), tx, steps=2)


@pytest.mark.slow
def test_bfloat16_parameters() -> None:
    tx, p = wait_free(jaxcomm.global_qsgd()), params(jnp.bfloat16)
    found, _, _ = check_equals_the_end(4, tx, p=p)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}


def linear_loss(p: Any, x: jax.Array) -> jax.Array:
    """Gradients are rows of the batch, so that all sums are of integers."""

    def body(total: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return total + one_layer(scheduling.aggregate_in_backward(layer), x), None

    total, _ = lax.scan(body, jnp.sum(x[0] * p["last"]), p["layers"])
    return total


def one_layer(p: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(p["w"] * x[0][:, None]) + jnp.sum(p["b"] * x[0])


@pytest.mark.slow
def test_layers_equal_the_aggregator_alone() -> None:
    """An oracle without `wait_free`: the parameters of a layer, in an aggregator of their own."""
    x = jnp.asarray(np.random.default_rng(2).integers(-8, 9, (4, models.SIDE)), jnp.float32)

    def trained(tx: Any, p: Any, loss_fn: Any) -> Any:
        chain = optax.chain(tx, optax.sgd(0.125))
        state, step = jaxcomm.init(chain, p, 4), models.build(4, loss_fn, chain)
        for _ in range(3):
            p, state, _ = step(p, state, x)
        return p

    whole = {name: params()[name] for name in ("layers", "last")}
    stacked = scheduling.wait_free(TOP_K, stacked={"layers": True, "last": False})
    found = trained(stacked, whole, linear_loss)["layers"]
    for layer in range(models.LAYERS):
        of_layer = functools.partial(jax.tree.map, lambda leaf, n=layer: leaf[n])
        alone = trained(TOP_K, of_layer(whole["layers"]), one_layer)
        chex.assert_trees_all_equal(of_layer(found), alone)


FORMS: dict[str, Any] = {
    "remat": functools.partial(loss, body=jax.checkpoint(models.body)),
    "unroll": functools.partial(loss, unroll=2),
    "unroll_all": functools.partial(loss, unroll=True),
    "remat_of_all": jax.checkpoint(loss),
    "jit_of_remat": jax.jit(jax.checkpoint(loss)),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_loop(form: str) -> None:
    inside = train(mesh_of(4), wait_free(), FORMS[form])
    after = train(mesh_of(4), wait_free(), FORMS[form], gradients=at_end)
    chex.assert_trees_all_close(plain(inside), plain(after), rtol=1e-6, atol=1e-7)
    for a, b in zip(inside[1][0].layers, after[1][0].layers, strict=True):
        chex.assert_trees_all_equal(plain(a.step), plain(b.step))


@pytest.mark.slow
def test_two_axes_of_workers_nested() -> None:
    axes = ("dcn", "ici")
    mesh = jax.make_mesh((2, 2), axes, axis_types=(AxisType.Auto,) * 2)
    tx = wait_free(jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.top_k_sgd("dcn", ratio=0.25)))
    inside = train(mesh, tx, axis_name=axes)
    gradients = functools.partial(jaxcomm.local_value_and_grad, axis_name=axes)
    after = train(mesh, tx, axis_name=axes, gradients=lambda f, *args: gradients(f)(*args))
    chex.assert_trees_all_equal(plain(inside), plain(after))


@pytest.mark.slow
def test_steps_in_a_scan() -> None:
    mesh = mesh_of(4)
    chain = optax.chain(wait_free(), optax.sgd(0.1, momentum=0.9))
    step = models.build(mesh, loss, chain)

    @jax.jit
    def three(p: Any, state: Any) -> Any:
        body = lambda carry, _: (step(*carry, batch())[:2], None)  # noqa: E731
        return lax.scan(body, (p, state), None, length=3)[0]

    found, _ = three(params(), jaxcomm.init(chain, params(), mesh))
    chex.assert_trees_all_close(found, train(mesh, wait_free())[0], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_micro_batches() -> None:
    whole, parts = (train(mesh_of(4), wait_free(micro_batches=count)) for count in (1, 2))
    chex.assert_trees_all_close(plain(parts[0]), plain(whole[0]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(parts[2]["loss"], whole[2]["loss"], rtol=1e-6)


def bytes_of(tx: Any, p: Any, loss_fn: Any, x: Any) -> float:
    chain = optax.chain(tx, optax.sgd(0.1))
    step = models.build(4, loss_fn, chain, metrics="own")
    return jaxcomm.wire.account(step, p, jaxcomm.init(chain, p, 4), x).bytes_per_worker


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_bytes_are_those_of_the_groups(micro_batches: int) -> None:
    """A layer and a group send once what the aggregator alone sends for them."""

    def alone(tree: Any) -> float:
        total = lambda p, x: sum(jnp.sum(leaf) * x[0] for leaf in jax.tree.leaves(p))  # noqa: E731
        return bytes_of(TOP_K, tree, total, jnp.ones(4))

    p = params()
    tx = wait_free(plan=[["['last']"], ["['first']"]], micro_batches=micro_batches)
    one = jax.tree.map(lambda x: x[0], p["layers"])
    expected = alone(p["first"]) + alone(p["last"]) + models.LAYERS * alone(one)
    assert bytes_of(tx, p, loss, batch()) == expected


def test_groups_are_independent() -> None:
    """Groups of equal gradients are rounded independently."""
    p = {name: jnp.zeros(64) for name in "ab"}
    tx = scheduling.wait_free(jaxcomm.global_qsgd(), plan=[["['a']"], ["['b']"]])
    chain = optax.chain(tx, optax.sgd(1.0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)), jnp.float32)
    step = models.build(4, lambda p, x: jnp.sum(p["a"] * x[0]) + jnp.sum(p["b"] * x[0]), chain)
    p, _, _ = step(p, jaxcomm.init(chain, p, 4), x)
    assert np.any(np.asarray(p["a"]) != np.asarray(p["b"]))


@pytest.mark.slow
def test_order_changes_no_number() -> None:
    plan = [["['last']"], ["['first']"]]
    found, other = (train(4, wait_free(plan=plan, ordered=ordered)) for ordered in (True, False))
    chex.assert_trees_all_equal(plain(found), plain(other))
