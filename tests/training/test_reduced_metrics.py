"""Metrics that are sums and extremes: the numbers of one device with the whole batch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm import scheduling, training
from jaxcomm.synchronization import window_gradients
from jaxcomm.training import loss_scaled, loss_scaled_gradients

N = 4
SIZES = {"data": N}
X = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
KINDS = pytest.mark.parametrize("kind", ["mesh", "simulated"])


def own_metrics(w: Any, rows: jax.Array) -> dict[str, Any]:
    far = jnp.abs(rows @ w - 1)
    return {
        "hits": jaxcomm.metrics.sum(jnp.sum(far < 1, dtype=jnp.int32)),
        "total": jaxcomm.metrics.sum(jnp.sum(far).astype(jnp.bfloat16)),
        "worst": jaxcomm.metrics.max(jnp.max(far)),
        "best": jaxcomm.metrics.min(-jnp.min(far)),
        "first": jaxcomm.metrics.min(jnp.min(jnp.where(far < 1, jnp.arange(far.size), 99))),
        "any": jaxcomm.metrics.max({"of": jnp.any(far > 3)}),
        "share": jnp.mean(far < 1),
    }


def loss_fn(w: Any, rows: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
    return jnp.mean((rows @ w - 1) ** 2), own_metrics(w, rows)


def right(parts: int, x: np.ndarray = X) -> dict[str, Any]:
    """The metrics of NumPy, of rows in so many parts, with zeros as parameters but the first."""
    far = np.abs(x[:, 0].astype(np.float64) - 1).reshape(parts, -1)
    numbers = np.where(far < 1, np.arange(far.shape[1]), 99)
    return {
        "hits": (far < 1).sum(),
        "total": far.sum(),
        "worst": far.max(),
        "best": (-far.min(1)).min(),
        "first": numbers.min(),
        "any": {"of": (far > 3).any()},
        "share": (far < 1).mean(),
    }


W = np.array([1, 0, 0], np.float32)
INTEGERS = {"hits", "first"}


def check(metrics: dict[str, Any], parts: int, floating: bool = False) -> None:
    for name, value in right(parts).items():
        found = metrics[name]["of"] if name == "any" else metrics[name]
        value = value["of"] if name == "any" else value
        np.testing.assert_allclose(found, value, rtol=1e-2 if name == "total" else 1e-6)
        integer = name in INTEGERS | {"any"} and not floating
        assert found.dtype == (jnp.int32 if integer else jnp.float32), name


def build(
    kind: str, tx: Any = None, sizes: Any = SIZES, loss: Any = loss_fn, **options: Any
) -> Any:
    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1)) if tx is None else tx
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    workers: Any = mesh if kind == "mesh" else sizes
    make: Any = jaxcomm.make_step if kind == "mesh" else jaxcomm.simulate
    step = make(loss, tx, workers, has_aux=True, donate=False, **options)
    return step, jaxcomm.init(tx, W, workers), workers


@KINDS
@pytest.mark.parametrize("sizes", [{"data": 1}, SIZES, {"data": 2, "model": 4}])
def test_the_metrics_of_one_device(kind: str, sizes: Any) -> None:
    step, state, _ = build(kind, sizes=sizes)
    check(step(W, state, X)[2], int(np.prod([*sizes.values()])))


@KINDS
def test_of_each_worker(kind: str) -> None:
    step, state, _ = build(kind, sizes={"data": 2, "model": 2}, metrics="own")
    metrics = step(W, state, X)[2]
    for worker in range(2):
        far = np.abs(X[16 * worker :][:16, 0] - 1)
        assert metrics["hits"][worker] == (far < 1).sum() and metrics["hits"].dtype == jnp.int32
        np.testing.assert_allclose(metrics["worst"][worker], far.max(), rtol=1e-6)


@KINDS
def test_now_and_then(kind: str) -> None:
    tx = optax.chain(jaxcomm.mean(), optax.scale_by_schedule(lambda count: 0.0))
    step, state, _ = build(kind, tx, metrics=2)
    params, state, metrics = step(W, state, X)
    assert all(np.isnan(x) for x in jax.tree.leaves(metrics))
    check(step(params, state, X)[2], N, floating=True)


@KINDS
@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("where", [0, 2])
def test_nan_is_an_extreme(kind: str, name: str, where: int) -> None:
    def loss(w: Any, rows: jax.Array) -> Any:
        return jnp.sum(w), {"x": getattr(jaxcomm.metrics, name)(rows[0])}

    step, state, _ = build(kind, loss=loss)
    for special in (np.nan, -np.nan, np.inf, -np.inf):
        x = np.array([1, -0.5, 2, 1e-40], np.float32)
        x[where] = special
        found = step(W, state, x)[2]["x"]
        np.testing.assert_array_equal(found, getattr(np, name)(x))


@KINDS
@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.uint32, np.int32, np.float16])
def test_dtypes(kind: str, dtype: Any) -> None:
    def loss(w: Any, rows: jax.Array) -> Any:
        kinds = {name: getattr(jaxcomm.metrics, name)(rows[0]) for name in ("sum", "max", "min")}
        return jnp.sum(w), kinds

    step, state, _ = build(kind, loss=loss)
    x = np.array([100, 3, 0, 120], dtype)
    metrics = step(W, state, x)[2]
    assert [int(metrics[name]) for name in ("sum", "max", "min")] == [223, 120, 0]
    wide = {"f": jnp.float32, "u": jnp.uint32, "i": jnp.int32}[np.dtype(dtype).kind]
    assert {metrics[name].dtype for name in ("sum", "max", "min")} == {jnp.dtype(wide)}


@KINDS
def test_weights_do_not_scale_sums(kind: str) -> None:
    def gradients(loss_fn: Any, w: Any, batch: Any) -> Any:
        return *jaxcomm.local_value_and_grad(loss_fn, True)(w, batch[0]), batch[1][0]

    step, state, _ = build(kind, gradients=gradients)
    metrics = step(W, state, (X, np.array([0, 1, 2, 5], np.float32)))[2]
    assert metrics["weight"] == 8
    check({**metrics, "share": right(N)["share"].astype(np.float32)}, N)


@KINDS
@pytest.mark.parametrize("finished", [[8, 8, 8, 8], [2, 0, 8, 3], [0, 0, 0, 0]])
def test_windows(kind: str, finished: list[int]) -> None:
    gradients = functools.partial(window_gradients, has_aux=True)
    step, state, _ = build(kind, gradients=gradients)
    metrics = step(W, state, (X[:, None], np.array(finished, np.int32)))[2]
    far = np.concatenate([np.abs(X[8 * i :][:m, 0] - 1) for i, m in enumerate(finished)])
    assert metrics["hits"] == (far < 1).sum() and metrics["hits"].dtype == jnp.int32
    np.testing.assert_allclose(metrics["worst"], far.max(initial=-np.inf), rtol=1e-6)
    np.testing.assert_allclose(metrics["best"], (-far).min(initial=np.inf), rtol=1e-6)
    limit = np.iinfo(np.int32).max
    assert metrics["first"] == np.where(far < 1, 0, 99).min(initial=limit)


def test_micro_batches_and_model_state() -> None:
    tx = optax.chain(scheduling.wait_free(jaxcomm.mean(), micro_batches=2), optax.sgd(0.1))
    step, state, _ = build("mesh", tx)
    check(step(W, state, X)[2], 2 * N)

    def with_state(w: Any, count: jax.Array, rows: jax.Array) -> Any:
        loss, aux = loss_fn(w, rows)
        return loss, (count + 1, aux)

    step, state, _ = build(
        "mesh",
        loss=with_state,
        has_model_state=True,
        gradients=functools.partial(loss_scaled_gradients, has_aux=True),
    )
    check(step(W, loss_scaled(jnp.int32(0)), state, X)[3], N)


def test_fully_sharded() -> None:
    mesh = jax.make_mesh((N,), ("data",))
    run = training.fully_sharded_value_and_grad(loss_fn, mesh, jax.P(), has_aux=True)
    (_, metrics), _ = run(W, X)
    check(metrics, N)


def test_reduced_metrics_travel_with_the_means() -> None:
    """The bytes of `make_step`: an all-reduce of each kind and dtype, 4 bytes a number."""
    step, state, _ = build("mesh")
    found = jaxcomm.wire.account(step, W, state, X)
    kinds = sorted((c.primitive, str(c.dtype)) for c in found.collectives)
    ints, floats = ("all_reduce", "int32"), ("all_reduce", "float32")
    # Means of the gradient, the loss and the share, and one total; hits; two and two extremes.
    assert kinds == sorted([floats] * 4 + [ints] * 5)
    text = jax.jit(step).lower(W, state, X).compile().as_text()
    assert text.count(" all-reduce(") <= 3


@KINDS
@pytest.mark.parametrize("count", [3, jnp.int32(3), jnp.arange(2, dtype=jnp.uint8)])
def test_an_integer_states_how_it_is_reduced(kind: str, count: Any) -> None:
    for gradients in (None, functools.partial(window_gradients, has_aux=True)):
        step, state, _ = build(
            kind, loss=lambda w, x: (jnp.mean(x @ w), {"n": count}), gradients=gradients
        )
        batch = X if gradients is None else (X[:, None], np.ones(N, np.int32))
        with pytest.raises(ValueError, match=r"`aux\['n'\]` is u?int.*`jaxcomm.metrics.sum\(n\)"):
            step(W, state, batch)


def test_an_integer_of_each_worker_needs_no_reduction() -> None:
    step, state, _ = build(
        "mesh", loss=lambda w, x: (jnp.mean(x @ w), {"rows": len(x)}), metrics="own"
    )
    np.testing.assert_array_equal(step(W, state, X)[2]["rows"], np.full(N, 8))


def test_a_sum_of_examples_of_different_workers() -> None:
    step, state, _ = build(
        "mesh", loss=lambda w, x: (jnp.mean(x @ w), {"n": jaxcomm.metrics.sum(x @ w)})
    )
    with pytest.raises(
        ValueError, match=r"`aux\['n'\]` has .* one value per .* return its sum, or"
    ):
        step(W, state, X)
