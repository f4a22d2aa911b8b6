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
from jaxcomm.compression import feedback, quantizers
from tests.cases import CASES, Case
from tests.scheduling import models
from tests.scheduling.models import STACKED, at_end, batch, loss, params, plain, train
from tests.slow import slow
from tests.workers import mesh_of

METHODS = {
    "mean": jaxcomm.mean,
    "global_qsgd": jaxcomm.global_qsgd,
    "top_k": lambda: jaxcomm.top_k_sgd(ratio=0.25),
    "power_sgd": lambda: jaxcomm.power_sgd(rank=1),
    "two_stage": lambda: jaxcomm.two_stage_mean(feedback.error_feedback(quantizers.one_bit())),
}


def wait_free(tx: Any, **options: Any) -> Any:
    return scheduling.wait_free(tx, stacked=STACKED, **options)


def explicit(workers: int) -> Any:
    devices = np.array(jax.devices()[:workers])
    return jax.sharding.Mesh(devices, ("data",), axis_types=(AxisType.Explicit,))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "workers",
    [pytest.param(mesh_of(4), id="mesh"), *map(slow, [4, explicit(4), mesh_of(1), mesh_of(8)])],
)
@pytest.mark.parametrize(
    "method", ["top_k", "global_qsgd", *map(slow, ["mean", "power_sgd", "two_stage"])]
)
def test_equals_the_end(method: str, workers: Any) -> None:
    make = METHODS[method]
    inside = train(workers, wait_free(make()))
    after = train(workers, wait_free(make()), gradients=at_end)
    chex.assert_trees_all_equal(plain(inside), plain(after))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_row_equals_the_end(case: Case) -> None:
    try:
        tx = wait_free(case.make())
    except ValueError as error:
        assert "all gradients at once" in str(error) or case.name == "parallax"
        return
    inside = train(mesh_of(4), tx, steps=2)
    after = train(mesh_of(4), tx, steps=2, gradients=at_end)
    chex.assert_trees_all_equal(plain(inside), plain(after))


def linear_loss(p: Any, x: jax.Array) -> jax.Array:
    """Gradients are rows of the batch, so that all sums are of integers."""

    def body(total: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        weights = scheduling.aggregate_in_backward(layer)
        return total + jnp.sum(weights["w"] * x[0][:, None]) + jnp.sum(weights["b"] * x[0]), None

    total, _ = lax.scan(body, jnp.sum(x[0] * p["last"]), p["layers"])
    return total


@pytest.mark.slow
@pytest.mark.parametrize("layer", range(models.LAYERS))
def test_a_layer_equals_the_aggregator_alone(layer: int) -> None:
    """An oracle without `wait_free`: the parameters of one layer, in an aggregator of their own."""
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.integers(-8, 9, (4, models.SIDE)), jnp.float32)
    whole = {name: params()[name] for name in ("layers", "last")}
    one = jax.tree.map(lambda leaf: leaf[layer], whole["layers"])
    tx = jaxcomm.top_k_sgd(ratio=0.25)
    stacked = scheduling.wait_free(tx, stacked={"layers": True, "last": False})

    def alone(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(p["w"] * x[0][:, None]) + jnp.sum(p["b"] * x[0])

    both = []
    for tree, method, loss_fn in ((whole, stacked, linear_loss), (one, tx, alone)):
        chain = optax.chain(method, optax.sgd(0.125))
        p, state = tree, jaxcomm.init(chain, tree, 4)
        step = models.build(4, loss_fn, chain)
        for _ in range(3):
            p, state, _ = step(p, state, x)
        both.append(p)
    chex.assert_trees_all_equal(jax.tree.map(lambda leaf: leaf[layer], both[0]["layers"]), both[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    ["remat", *map(slow, ["unroll", "unroll_all", "remat_of_all", "jit", "jit_of_remat"])],
)
def test_forms_of_the_loop(variant: str) -> None:
    forms: dict[str, Any] = {
        "remat": functools.partial(loss, body=jax.checkpoint(models.body)),
        "unroll": functools.partial(loss, unroll=2),
        "unroll_all": functools.partial(loss, unroll=True),
        "remat_of_all": jax.checkpoint(loss),
        "jit": jax.jit(loss),
        "jit_of_remat": jax.jit(jax.checkpoint(loss)),
    }
    make = METHODS["top_k"]
    inside = train(mesh_of(4), wait_free(make()), forms[variant])
    after = train(mesh_of(4), wait_free(make()), forms[variant], gradients=at_end)
    chex.assert_trees_all_close(plain(inside), plain(after), rtol=1e-6, atol=1e-7)
    for a, b in zip(inside[1][0].layers, after[1][0].layers, strict=True):
        chex.assert_trees_all_equal(plain(a.step), plain(b.step))


@pytest.mark.slow
def test_bfloat16_parameters() -> None:
    p = params(jnp.bfloat16)
    inside = train(4, wait_free(jaxcomm.global_qsgd()), p=p)
    after = train(4, wait_free(jaxcomm.global_qsgd()), p=p, gradients=at_end)
    assert {x.dtype for x in jax.tree.leaves(inside[0])} == {jnp.dtype(jnp.bfloat16)}
    chex.assert_trees_all_equal(plain(inside), plain(after))


@pytest.mark.slow
def test_two_axes_of_workers_nested() -> None:
    mesh = jax.make_mesh((2, 2), ("dcn", "ici"), axis_types=(AxisType.Auto,) * 2)
    tx = jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.top_k_sgd("dcn", ratio=0.25))
    options: Any = {"axis_name": ("dcn", "ici")}
    inside = train(mesh, wait_free(tx), **options)
    gradients = lambda f, *args: jaxcomm.local_value_and_grad(  # noqa: E731
        f, axis_name=("dcn", "ici")
    )(*args)
    after = train(mesh, wait_free(tx), gradients=gradients, **options)
    chex.assert_trees_all_equal(plain(inside), plain(after))


@pytest.mark.slow
def test_devices_of_one_worker() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    inside = train(mesh, wait_free(jaxcomm.mean()))
    whole = train(mesh_of(1), jaxcomm.mean())
    chex.assert_trees_all_close(inside[0], whole[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(inside[2]["loss"], whole[2]["loss"], rtol=1e-6)


@pytest.mark.slow
def test_steps_in_a_scan() -> None:
    mesh = mesh_of(4)
    chain = optax.chain(wait_free(jaxcomm.top_k_sgd(ratio=0.25)), optax.sgd(0.1, momentum=0.9))
    p, state = params(), jaxcomm.init(chain, params(), mesh)
    step = models.build(mesh, loss, chain)

    @jax.jit
    def three(p: Any, state: Any) -> Any:
        body = lambda carry, _: (step(*carry, batch())[:2], None)  # noqa: E731
        return lax.scan(body, (p, state), None, length=3)[0]

    expected = train(mesh, wait_free(jaxcomm.top_k_sgd(ratio=0.25)))
    found = three(p, state)
    chex.assert_trees_all_close(plain(found[0]), plain(expected[0]), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_weights_at_the_end() -> None:
    """Weighted gradients come from `gradients=`, after the backward pass."""

    def weighted(loss_fn: Any, p: Any, rows: jax.Array) -> Any:
        value, gradient = jaxcomm.local_value_and_grad(loss_fn)(p, rows)
        return value, gradient, 1 + lax.axis_index("data").astype(jnp.float32)

    found = train(4, wait_free(jaxcomm.mean()), gradients=weighted)
    expected = train(4, jaxcomm.mean(), gradients=weighted)
    chex.assert_trees_all_close(found[0], expected[0], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mean", slow("top_k")])
def test_micro_batches(method: str) -> None:
    make = METHODS[method]
    whole = train(mesh_of(4), wait_free(make()))
    parts = train(mesh_of(4), wait_free(make(), micro_batches=2))
    chex.assert_trees_all_close(plain(parts[0]), plain(whole[0]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(parts[2]["loss"], whole[2]["loss"], rtol=1e-6)


def test_micro_batches_send_once() -> None:
    def account(micro_batches: int) -> Any:
        chain = optax.chain(
            wait_free(jaxcomm.top_k_sgd(ratio=0.25), micro_batches=micro_batches), optax.sgd(0.1)
        )
        step = models.build(4, loss, chain)
        return jaxcomm.wire.account(step, params(), jaxcomm.init(chain, params(), 4), batch())

    assert account(2).bytes_per_worker == account(1).bytes_per_worker


def test_bytes_are_those_of_the_groups() -> None:
    """A layer and a group send what the aggregator alone sends for them."""

    def bytes_of(tree: Any) -> float:
        tx = jaxcomm.top_k_sgd(ratio=0.25)
        step = models.build(
            4,
            lambda p, x: sum(jnp.sum(leaf) * x[0] for leaf in jax.tree.leaves(p)),
            optax.chain(tx, optax.sgd(0.1)),
            metrics="own",
        )
        state = jaxcomm.init(optax.chain(tx, optax.sgd(0.1)), tree, 4)
        return float(jaxcomm.wire.account(step, tree, state, jnp.ones(4)).bytes_per_worker)

    chain = optax.chain(
        wait_free(jaxcomm.top_k_sgd(ratio=0.25), plan=[["['last']"], ["['first']"]]), optax.sgd(0.1)
    )
    step = models.build(4, loss, chain, metrics="own")
    sent = jaxcomm.wire.account(step, params(), jaxcomm.init(chain, params(), 4), batch())
    p = params()
    one = jax.tree.map(lambda x: x[0], p["layers"])
    expected = bytes_of(p["first"]) + bytes_of(p["last"]) + models.LAYERS * bytes_of(one)
    assert sent.bytes_per_worker == expected


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
@pytest.mark.parametrize("ordered", [True, slow(False)])
def test_order_changes_no_number(ordered: bool) -> None:
    plan = [["['last']"], ["['first']"]]
    found = train(4, wait_free(jaxcomm.top_k_sgd(ratio=0.25), plan=plan, ordered=ordered))
    one = train(4, wait_free(jaxcomm.top_k_sgd(ratio=0.25), plan=plan, ordered=not ordered))
    chex.assert_trees_all_equal(plain(found), plain(one))
