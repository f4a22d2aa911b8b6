"""Layers that are not used, used twice, not finite; state; and mistakes."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxcomm
from jaxcomm import scheduling
from jaxcomm.scheduling import aggregate_in_backward
from tests.scheduling import models
from tests.scheduling.models import STACKED, batch, layer, loss, params, plain, train
from tests.workers import mesh_of


def wait_free(tx: Any, **options: Any) -> Any:
    return scheduling.wait_free(tx, stacked=STACKED, **options)


@pytest.mark.slow
def test_an_unused_layer_keeps_its_state() -> None:
    def without_the_second(p: Any, x: jax.Array) -> jax.Array:
        h = x @ p["first"]
        for number in (0, 2):
            weights = jax.tree.map(lambda leaf, n=number: leaf[n], p["layers"])
            h = layer(h, aggregate_in_backward(weights))
        return jnp.mean((h @ p["last"]) ** 2)

    tx = wait_free(jaxcomm.top_k_sgd(ratio=0.25))
    p, state, _ = train(mesh_of(4), tx, without_the_second)
    (layers,) = state[0].layers
    np.testing.assert_array_equal(layers.step, [3, 0, 3])
    np.testing.assert_array_equal(p["layers"]["w"][1], params()["layers"]["w"][1])
    assert not np.array_equal(p["layers"]["w"][0], params()["layers"]["w"][0])
    residual = layers.own.per_worker["data"][0].kept
    assert residual.shape[:2] == (4, models.LAYERS)
    assert not np.any(residual[:, 1])
    assert np.all(np.any(np.asarray(residual)[:, [0, 2]], axis=-1))


def test_layers_that_the_loss_ignores() -> None:
    tx = wait_free(jaxcomm.top_k_sgd(ratio=0.25))
    p, state, _ = train(mesh_of(4), tx, lambda p, x: jnp.mean((x @ p["first"] @ p["last"]) ** 2))
    np.testing.assert_array_equal(state[0].layers[0].step, [0, 0, 0])
    np.testing.assert_array_equal(p["layers"]["w"], params()["layers"]["w"])


@pytest.mark.slow
def test_a_tied_leaf_is_aggregated_once() -> None:
    """The gradient of a leaf outside stacks is the sum over its uses."""

    def tied(p: Any, x: jax.Array) -> jax.Array:
        h, _ = lax.scan(models.body, x @ p["first"], p["layers"])
        return jnp.mean((h @ p["first"] @ p["last"]) ** 2)

    found = train(mesh_of(4), wait_free(jaxcomm.mean()), tied)
    expected = train(mesh_of(4), jaxcomm.mean(), tied)
    chex.assert_trees_all_close(found[0], expected[0], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_tied_layers_are_nan() -> None:
    """JAX adds the next states of two uses; neither this sum nor a mean of parts may come out."""

    def twice(p: Any, x: jax.Array) -> jax.Array:
        h, _ = lax.scan(models.body, x @ p["first"], p["layers"])
        h, _ = lax.scan(models.body, h, p["layers"])
        return jnp.mean((h @ p["last"]) ** 2)

    tx = wait_free(jaxcomm.top_k_sgd(ratio=0.25))
    p, state, _ = train(mesh_of(4), tx, twice, steps=1)
    assert np.all(np.isnan(p["layers"]["w"]))
    np.testing.assert_array_equal(state[0].layers[0].step, [0, 0, 0])


@pytest.mark.slow
def test_one_workers_nan() -> None:
    tx = optax.chain(wait_free(jaxcomm.top_k_sgd(ratio=0.25)), optax.sgd(0.1))
    skipping = jaxcomm.skip_nonfinite(tx)
    start = jaxcomm.init(skipping, params(), mesh_of(4))
    step = models.build(mesh_of(4), loss, skipping)
    p, state, _ = step(params(), start, batch())
    after, skipped, metrics = step(p, state, batch().at[5].set(jnp.nan))
    chex.assert_trees_all_equal(after, p)
    chex.assert_trees_all_equal(plain(skipped.inner), plain(state.inner))
    assert int(skipped.skipped_steps) == 1
    assert metrics["diagnostics/skipped_steps"] == 1
    visible, _, _ = models.build(mesh_of(4), loss, tx)(p, state.inner, batch().at[5].set(jnp.nan))
    assert all(np.all(np.isnan(x)) for x in jax.tree.leaves(visible))


def test_a_nan_of_one_group_stays_there() -> None:
    p = {name: jnp.ones(4) for name in "ab"}
    tx = optax.chain(
        scheduling.wait_free(jaxcomm.global_qsgd(), plan=[["['a']"], ["['b']"]]), optax.sgd(0.1)
    )
    step = models.build(4, lambda p, x: jnp.sum(p["a"]) * x[0] + jnp.sum(p["b"]), tx)
    p, _, _ = step(p, jaxcomm.init(tx, p, 4), jnp.array([1.0, jnp.nan, 1.0, 1.0]))
    assert np.all(np.isnan(p["a"]))
    assert np.all(np.isfinite(p["b"]))


@pytest.mark.slow
def test_resized() -> None:
    tx = optax.chain(wait_free(jaxcomm.top_k_sgd(ratio=0.25)), optax.sgd(0.1, momentum=0.9))
    p, state, _ = train(4, wait_free(jaxcomm.top_k_sgd(ratio=0.25)))
    resized, _ = jaxcomm.resize_workers(tx, state, p, 2)
    before = state[0].layers[0].own.per_worker["data"][0].kept
    after = resized[0].layers[0].own.per_worker["data"][0].kept
    np.testing.assert_allclose(np.mean(after, 0), np.mean(before, 0), rtol=1e-6, atol=1e-8)
    models.build(2, loss, tx)(p, resized, batch())


@pytest.mark.parametrize(
    "before",
    [optax.clip_by_global_norm(1.0), optax.clip(1.0), optax.scale(2.0), optax.adam(1e-3)],
    ids=["global norm", "clip", "scale", "adam"],
)
def test_what_comes_before_is_refused(before: Any) -> None:
    with pytest.raises(ValueError, match="Place `wait_free` first"):
        train(4, optax.chain(before, wait_free(jaxcomm.mean())))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jaxcomm.global_qsgd(scope="tree"), "`scope`='tree'"),
        (lambda: jaxcomm.deep_gradient_compression(max_norm=1.0), "`max_norm`"),
        (
            lambda: jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.global_qsgd(scope="tree")),
            "`scope`='tree'",
        ),
        (lambda: optax.sgd(0.1), "takes aggregators"),
        (lambda: jaxcomm.skip_nonfinite(jaxcomm.mean()), "takes aggregators"),
    ],
)
def test_what_needs_all_gradients_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wait_free(make())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": [["['last']"]]}, "`plan` must list each leaf"),
        ({"plan": [["['last']", "['last']"], ["['first']"]]}, "`plan` must list each leaf"),
        ({"plan": [["['last']", "['none']"], ["['first']"]]}, "`plan` must list each leaf"),
        ({"plan": ["['last']"]}, "`plan` must list each leaf"),
        ({"bucket_bytes": "32MB"}, "`bucket_bytes` must be"),
        ({"micro_batches": 0}, "`micro_batches` must be"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(4, wait_free(jaxcomm.mean(), **options))


def test_a_loss_without_the_mark() -> None:
    def unmarked(p: Any, x: jax.Array) -> jax.Array:
        return loss(p, x, lambda h, weights: (layer(h, weights), None))

    with pytest.raises(ValueError, match="aggregate_in_backward"):
        train(4, wait_free(jaxcomm.mean()), unmarked)


def test_a_mark_on_all_layers() -> None:
    def on_all(p: Any, x: jax.Array) -> jax.Array:
        return loss({**p, "layers": aggregate_in_backward(p["layers"])}, x)

    with pytest.raises(ValueError, match="takes one layer"):
        train(4, wait_free(jaxcomm.mean()), on_all)


def _squares(p: Any) -> jax.Array:
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))  # type: ignore[return-value]


def _halves(x: Any) -> Any:
    return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x


@pytest.mark.parametrize(
    "with_all",
    [
        lambda p, x: loss(p, x) + _squares(p),
        lambda p, x: loss(p, x) + sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(p)),
        lambda p, x: loss(p, x) + optax.tree.norm(p["layers"]),
        lambda p, x: loss(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p), x),
        lambda p, x: loss(jax.tree.map(_halves, p), x),
    ],
    ids=["penalty", "vdot", "norm", "cast", "cast of floats"],
)
def test_a_loss_that_computes_with_all_layers(with_all: Any) -> None:
    """Else a norm would include the state, and a cast would round keys."""
    with pytest.raises(
        (AssertionError, TypeError, ValueError), match="must not compute with stacked layers"
    ):
        train(4, wait_free(jaxcomm.top_k_sgd(ratio=0.25)), with_all, steps=1)


@pytest.mark.slow
def test_computing_with_floats_of_layers_is_nan() -> None:
    """What passes over the guards is visible, and not a wrong mean."""

    def penalty(p: Any, x: jax.Array) -> jax.Array:
        leaves = [x for x in jax.tree.leaves(p) if jnp.issubdtype(x.dtype, jnp.floating)]
        return loss(p, x) + 0.1 * _squares(leaves)

    p, state, _ = train(4, wait_free(jaxcomm.top_k_sgd(ratio=0.25)), penalty, steps=1)
    assert np.all(np.isnan(p["layers"]["w"]))
    np.testing.assert_array_equal(state[0].layers[0].step, [0, 0, 0])


@pytest.mark.slow
def test_a_penalty_on_each_layer() -> None:
    def penalized(p: Any, x: jax.Array) -> jax.Array:
        def body(carry: Any, weights: Any) -> Any:
            weights = aggregate_in_backward(weights)
            return (layer(carry[0], weights), carry[1] + _squares(weights)), None

        (h, squares), _ = lax.scan(body, (x @ p["first"], 0 * jnp.sum(x)), p["layers"])
        return jnp.mean((h @ p["last"]) ** 2) + squares

    found = train(mesh_of(4), wait_free(jaxcomm.mean()), penalized)
    expected = train(mesh_of(4), jaxcomm.mean(), penalized)
    chex.assert_trees_all_close(found[0], expected[0], rtol=1e-6, atol=1e-7)


def test_groups_from_an_iterator() -> None:
    groups = iter([["['last']"], ["['first']"]])
    train(4, wait_free(jaxcomm.mean(), plan=groups), steps=1)


def test_no_parameters() -> None:
    _, _, metrics = train(
        4, scheduling.wait_free(jaxcomm.mean()), lambda p, x: jnp.mean(x), p={}, steps=1
    )
    np.testing.assert_allclose(metrics["loss"], jnp.mean(batch()), rtol=1e-6)


@pytest.mark.parametrize(
    "tx",
    [
        scheduling.wait_free(jaxcomm.mean()),
        jaxcomm.skip_nonfinite(scheduling.wait_free(jaxcomm.mean())),
        jaxcomm.skip_nonfinite(jaxcomm.mean()),
        jaxcomm.delayed(jaxcomm.mean()),
        jaxcomm.accumulate(jaxcomm.mean(), 2),
        jaxcomm.gradient_norms(jaxcomm.mean()),
    ],
)
@pytest.mark.parametrize("p", [{}, {"a": jnp.zeros((0, 3))}], ids=["none", "empty"])
def test_no_coordinates(tx: Any, p: Any) -> None:
    step = jaxcomm.simulate(lambda p, x: jnp.mean(x), tx, 2, donate=False)
    _, _, metrics = step(p, jaxcomm.init(tx, p, 2), jnp.ones(2))
    assert metrics["loss"] == 1


@pytest.mark.slow
def test_parameters_that_differ_by_worker() -> None:
    """The mean of gradients moves all replicas alike, as with the aggregator alone."""
    mesh, ends = mesh_of(4), []
    for tx in (wait_free(jaxcomm.mean()), jaxcomm.mean()):
        chain = optax.chain(tx, optax.sgd(0.1))
        p, state = jaxcomm.replicate(params(), mesh), jaxcomm.init(chain, params(), mesh)
        ends.append(models.build(mesh, loss, chain)(p, state, batch())[0])
    chex.assert_trees_all_close(*ends, rtol=1e-6, atol=1e-7)


def _by_label() -> Any:
    other = jaxcomm.mean()
    parts = {"a": scheduling.wait_free(jaxcomm.mean()), "b": other}
    return optax.multi_transform(parts, {"first": "a", "layers": "b", "last": "b"})


@pytest.mark.parametrize(
    "make",
    [lambda: optax.masked(wait_free(jaxcomm.mean()), {**STACKED, "first": True}), _by_label],
    ids=["masked", "multi_transform"],
)
def test_a_part_of_the_parameters(make: Any) -> None:
    with pytest.raises(ValueError, match="needs all parameters"):
        train(4, make())


def test_two_of_them() -> None:
    with pytest.raises(ValueError, match=r"several `wait_free`|Place `wait_free` first|summed"):
        train(4, optax.chain(wait_free(jaxcomm.mean()), wait_free(jaxcomm.mean())))
