"""Layers that are not used, used twice, not finite; state; and mistakes."""

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
from jaxcomm.scheduling import aggregate_in_backward
from tests.scheduling import models
from tests.scheduling.models import batch, layer, loss, params, plain, train
from tests.scheduling.test_wait_free import wait_free
from tests.workers import mesh_of

MEAN = jaxcomm.mean()


@pytest.mark.slow
def test_an_unused_layer_keeps_its_state() -> None:
    def without_the_second(p: Any, x: jax.Array) -> jax.Array:
        h = x @ p["first"]
        for number in (0, 2):
            weights = jax.tree.map(lambda leaf, n=number: leaf[n], p["layers"])
            h = layer(h, aggregate_in_backward(weights))
        return jnp.mean((h @ p["last"]) ** 2)

    p, state, _ = train(mesh_of(4), wait_free(), without_the_second)
    (layers,) = state[0].layers
    np.testing.assert_array_equal(layers.step, [3, 0, 3])
    np.testing.assert_array_equal(p["layers"]["w"][1], params()["layers"]["w"][1])
    assert not np.array_equal(p["layers"]["w"][0], params()["layers"]["w"][0])
    residual = layers.own.per_worker["data"][0].kept
    assert residual.shape[:2] == (4, models.LAYERS)
    assert not np.any(residual[:, 1])
    assert np.all(np.any(np.asarray(residual)[:, [0, 2]], axis=-1))


def test_layers_that_the_loss_ignores() -> None:
    ignores = lambda p, x: jnp.mean((x @ p["first"] @ p["last"]) ** 2)  # noqa: E731
    p, state, _ = train(4, wait_free(), ignores, steps=1)
    np.testing.assert_array_equal(state[0].layers[0].step, [0, 0, 0])
    np.testing.assert_array_equal(p["layers"]["w"], params()["layers"]["w"])


def tied(p: Any, x: jax.Array) -> jax.Array:
    h, _ = lax.scan(models.body, x @ p["first"], p["layers"])
    return jnp.mean((h @ p["first"] @ p["last"]) ** 2)


def penalized(p: Any, x: jax.Array) -> jax.Array:
    """With a penalty on each layer, which is inside of the loop."""

    def body(carry: Any, weights: Any) -> Any:
        weights = aggregate_in_backward(weights)
        return (layer(carry[0], weights), carry[1] + _squares(weights)), None

    (h, squares), _ = lax.scan(body, (x @ p["first"], 0 * jnp.sum(x)), p["layers"])
    return jnp.mean((h @ p["last"]) ** 2) + squares


def weighted(loss_fn: Any, p: Any, rows: jax.Array) -> Any:
    """Weighted gradients come from `gradients=`, after the backward pass."""
    value, gradient = jaxcomm.local_value_and_grad(loss_fn)(p, rows)
    return value, gradient, 1 + lax.axis_index("data").astype(jnp.float32)


TWO_DEVICES = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (mesh_of(4), {"loss_fn": tied}),
        (mesh_of(4), {"loss_fn": penalized}),
        (4, {"gradients": weighted}),
        (TWO_DEVICES, {}),
    ],
    ids=["tied", "penalized", "weighted", "two devices of a worker"],
)
def test_equals_the_mean_alone(workers: Any, options: Any) -> None:
    """The gradient of a leaf outside stacks is the sum over its uses."""
    found, expected = (train(workers, tx, **options) for tx in (wait_free(MEAN), MEAN))
    chex.assert_trees_all_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[2]["loss"], expected[2]["loss"], rtol=1e-6)


def _squares(p: Any) -> jax.Array:
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))  # type: ignore[return-value]


def twice(p: Any, x: jax.Array) -> jax.Array:
    h, _ = lax.scan(models.body, x @ p["first"], p["layers"])
    h, _ = lax.scan(models.body, h, p["layers"])
    return jnp.mean((h @ p["last"]) ** 2)


def penalty_of_floats(p: Any, x: jax.Array) -> jax.Array:
    leaves = [x for x in jax.tree.leaves(p) if jnp.issubdtype(x.dtype, jnp.floating)]
    return loss(p, x) + 0.1 * _squares(leaves)


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", [twice, penalty_of_floats])
def test_unguarded_nonfinite_updates_are_nan(loss_fn: Any) -> None:
    """JAX adds the next states of two uses; neither this sum nor a mean of parts may come out."""
    p, state, _ = train(4, wait_free(), loss_fn, steps=1)
    assert np.all(np.isnan(p["layers"]["w"]))
    np.testing.assert_array_equal(state[0].layers[0].step, [0, 0, 0])


@pytest.mark.slow
def test_one_workers_nan() -> None:
    tx = optax.chain(wait_free(), optax.sgd(0.1))
    skipping = jaxcomm.skip_nonfinite(tx)
    step = models.build(mesh_of(4), loss, skipping)
    p, state, _ = step(params(), jaxcomm.init(skipping, params(), mesh_of(4)), batch())
    spoilt = batch().at[5].set(jnp.nan)
    after, skipped, metrics = step(p, state, spoilt)
    chex.assert_trees_all_equal((after, plain(skipped.inner)), (p, plain(state.inner)))
    assert (skipped.skipped_steps, metrics["diagnostics/skipped_steps"]) == (1, 1)
    visible, _, _ = models.build(mesh_of(4), loss, tx)(p, state.inner, spoilt)
    assert all(np.all(np.isnan(x)) for x in jax.tree.leaves(visible))


def test_a_nan_stays_in_its_group() -> None:
    p = {name: jnp.ones(4) for name in "ab"}
    groups = iter([["['a']"], ["['b']"]])
    tx = optax.chain(scheduling.wait_free(jaxcomm.global_qsgd(), plan=groups), optax.sgd(0.1))
    step = models.build(4, lambda p, x: jnp.sum(p["a"]) * x[0] + jnp.sum(p["b"]), tx)
    p, _, _ = step(p, jaxcomm.init(tx, p, 4), jnp.array([1.0, jnp.nan, 1.0, 1.0]))
    assert np.all(np.isnan(p["a"])) and np.all(np.isfinite(p["b"]))


@pytest.mark.slow
def test_resized() -> None:
    tx = optax.chain(wait_free(), optax.sgd(0.1, momentum=0.9))
    p, state, _ = train(4, wait_free())
    resized, _ = jaxcomm.resize_workers(tx, state, p, 2)
    before, after = (s[0].layers[0].own.per_worker["data"][0].kept for s in (state, resized))
    np.testing.assert_allclose(np.mean(after, 0), np.mean(before, 0), rtol=1e-6, atol=1e-8)
    models.build(2, loss, tx)(p, resized, batch())


@pytest.mark.slow
def test_parameters_that_differ_by_worker() -> None:
    """The mean of gradients moves all replicas equally, as with the aggregator alone."""
    mesh, ends = mesh_of(4), []
    for tx in (wait_free(MEAN), MEAN):
        chain = optax.chain(tx, optax.sgd(0.1))
        p, state = jaxcomm.replicate(params(), mesh), jaxcomm.init(chain, params(), mesh)
        ends.append(models.build(mesh, loss, chain)(p, state, batch())[0])
    chex.assert_trees_all_close(*ends, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "tx",
    [
        jaxcomm.skip_nonfinite(scheduling.wait_free(MEAN)),
        jaxcomm.skip_nonfinite(MEAN),
        jaxcomm.delayed(MEAN),
        jaxcomm.accumulate(MEAN, 2),
        jaxcomm.gradient_norms(MEAN),
    ],
)
def test_no_coordinates(tx: Any) -> None:
    for p in ({}, {"a": jnp.zeros((0, 3))}):
        step = jaxcomm.simulate(lambda p, x: jnp.mean(x), tx, 2, donate=False)
        assert step(p, jaxcomm.init(tx, p, 2), jnp.ones(2))[2]["loss"] == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optax.chain(optax.clip_by_global_norm(1.0), wait_free()), "Place `wait_free` fi"),
        (lambda: optax.chain(wait_free(), wait_free()), "several `wait_free`|Place `wait|summed"),
        (lambda: wait_free(jaxcomm.global_qsgd(scope="tree")), "`scope`='tree'"),
        (lambda: wait_free(jaxcomm.deep_gradient_compression(max_norm=1.0)), "`max_norm`"),
        (lambda: wait_free(jaxcomm.skip_nonfinite(MEAN)), "takes aggregators"),
        (
            lambda: wait_free(MEAN, plan=[["['last']", "['last']"], ["['first']"]]),
            "`plan` must list each leaf",
        ),
        (
            lambda: optax.multi_transform(
                {"a": scheduling.wait_free(MEAN), "b": MEAN},
                {"first": "a", "layers": "b", "last": "b"},
            ),
            "needs all parameters",
        ),
    ],
)
def test_mistakes(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(4, make(), steps=1)


ALL_LAYERS = "must not compute with stacked layers"


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (
            lambda p, x: loss(p, x, lambda h, weights: (layer(h, weights), None)),
            "aggregate_in_backward",
        ),
        (
            lambda p, x: loss({**p, "layers": aggregate_in_backward(p["layers"])}, x),
            "takes one layer",
        ),
        # Else a norm would include the state, and a cast would round keys.
        (lambda p, x: loss(p, x) + _squares(p), ALL_LAYERS),
        (lambda p, x: loss(p, x) + sum(jnp.vdot(y, y) for y in jax.tree.leaves(p)), ALL_LAYERS),
        (lambda p, x: loss(jax.tree.map(lambda y: y.astype(jnp.bfloat16), p), x), ALL_LAYERS),
    ],
    ids=["no mark", "mark on all", "penalty", "vdot", "cast"],
)
def test_mistakes_of_losses(loss_fn: Any, message: str) -> None:
    with pytest.raises((AssertionError, TypeError, ValueError), match=message):
        train(4, wait_free(), loss_fn, steps=1)
