"""Metrics that are sums and extremes: the numbers of one device with the whole batch."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import scheduling, training
from jaxcomm.synchronization import window_gradients
from jaxcomm.training import loss_scaled, loss_scaled_gradients
from tests.slow import slow
from tests.training.places import SGD, at, begun, devices_at

N = 4
X = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
PLACES = pytest.mark.parametrize("where", ["auto 4", "simulated 4"])


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


def build(where: str, loss: Any = loss_fn, tx: Any = SGD, **options: Any) -> Any:
    return begun(loss, tx, at(where), W, has_aux=True, **options)


@pytest.mark.parametrize("where", ["auto 4", "simulated 4", *map(slow, ["auto 1", "auto 2x4"])])
def test_the_metrics_of_one_device(where: str) -> None:
    step, state = build(where)
    check(step(W, state, X)[2], devices_at(where))


@pytest.mark.parametrize("where", ["auto 2x2", slow("simulated 2x2")])
def test_of_each_worker(where: str) -> None:
    step, state = build(where, metrics="own")
    metrics = step(W, state, X)[2]
    for worker in range(2):
        far = np.abs(X[16 * worker :][:16, 0] - 1)
        assert metrics["hits"][worker] == (far < 1).sum() and metrics["hits"].dtype == jnp.int32
        np.testing.assert_allclose(metrics["worst"][worker], far.max(), rtol=1e-6)


@PLACES
def test_reduced_metrics_at_an_interval(where: str) -> None:
    tx = optax.chain(jaxcomm.mean(), optax.scale_by_schedule(lambda count: 0.0))
    step, state = build(where, tx=tx, metrics=2)
    params, state, metrics = step(W, state, X)
    assert all(np.isnan(x) for x in jax.tree.leaves(metrics))
    check(step(params, state, X)[2], N, floating=True)


def of_rows(w: Any, rows: jax.Array) -> Any:
    kinds = {name: getattr(jaxcomm.metrics, name)(rows[0]) for name in ("sum", "max", "min")}
    return jnp.sum(w), kinds


@PLACES
def test_nan_is_an_extreme(where: str) -> None:
    step, state = build(where, of_rows)
    for special in (np.nan, -np.nan, np.inf, -np.inf):
        for place in (0, 2):
            x = np.array([1, -0.5, 2, 1e-40], np.float32)
            x[place] = special
            found = step(W, state, x)[2]
            for name in ("max", "min"):
                np.testing.assert_array_equal(found[name], getattr(np, name)(x))


@pytest.mark.parametrize("where", ["simulated 4", slow("auto 4")])
@pytest.mark.parametrize("dtype", [np.int8, np.uint16, slow(np.uint32), slow(np.float16)])
def test_dtypes(where: str, dtype: Any) -> None:
    step, state = build(where, of_rows)
    metrics = step(W, state, np.array([100, 3, 0, 120], dtype))[2]
    assert [int(metrics[name]) for name in ("sum", "max", "min")] == [223, 120, 0]
    wide = {"f": jnp.float32, "u": jnp.uint32, "i": jnp.int32}[np.dtype(dtype).kind]
    assert {metrics[name].dtype for name in ("sum", "max", "min")} == {jnp.dtype(wide)}


@PLACES
def test_weights_do_not_scale_sums(where: str) -> None:
    def gradients(loss_fn: Any, w: Any, batch: Any) -> Any:
        return *jaxcomm.local_value_and_grad(loss_fn, True)(w, batch[0]), batch[1][0]

    step, state = build(where, gradients=gradients)
    metrics = step(W, state, (X, np.array([0, 1, 2, 5], np.float32)))[2]
    assert metrics["weight"] == 8
    check({**metrics, "share": right(N)["share"].astype(np.float32)}, N)


@pytest.mark.parametrize("where", ["auto 4", slow("simulated 4")])
def test_windows(where: str) -> None:
    gradients = functools.partial(window_gradients, has_aux=True)
    step, state = build(where, gradients=gradients)
    for finished in ([8, 8, 8, 8], [2, 0, 8, 3], [0, 0, 0, 0]):
        metrics = step(W, state, (X[:, None], np.array(finished, np.int32)))[2]
        far = np.concatenate([np.abs(X[8 * i :][:m, 0] - 1) for i, m in enumerate(finished)])
        assert metrics["hits"] == (far < 1).sum() and metrics["hits"].dtype == jnp.int32
        np.testing.assert_allclose(metrics["worst"], far.max(initial=-np.inf), rtol=1e-6)
        np.testing.assert_allclose(metrics["best"], (-far).min(initial=np.inf), rtol=1e-6)
        limit = np.iinfo(np.int32).max
        assert metrics["first"] == np.where(far < 1, 0, 99).min(initial=limit)


def test_micro_batches_and_model_state() -> None:
    tx = optax.chain(scheduling.wait_free(jaxcomm.mean(), micro_batches=2), optax.sgd(0.1))
    step, state = build("auto 4", tx=tx)
    check(step(W, state, X)[2], 2 * N)

    def with_state(w: Any, count: jax.Array, rows: jax.Array) -> Any:
        loss, aux = loss_fn(w, rows)
        return loss, (count + 1, aux)

    gradients = functools.partial(loss_scaled_gradients, has_aux=True)
    step, state = build("auto 4", with_state, has_model_state=True, gradients=gradients)
    check(step(W, loss_scaled(jnp.int32(0)), state, X)[3], N)


def test_fully_sharded() -> None:
    mesh = at("explicit 4")
    run = training.fully_sharded_value_and_grad(loss_fn, mesh, jax.P(), has_aux=True)
    (_, metrics), _ = run(W, X)
    check(metrics, N)


def test_reduced_metrics_travel_with_the_means() -> None:
    """The bytes of `make_step`: an all-reduce of each kind and dtype, 4 bytes a number."""
    step, state = build("auto 4")
    found = jaxcomm.wire.account(step, W, state, X)
    kinds = sorted((c.kind, str(c.dtype)) for c in found.collectives)
    ints, floats = ("all_reduce", "int32"), ("all_reduce", "float32")
    # Means of the gradient, the loss and the share, and one total; hits; two and two extremes.
    assert kinds == sorted([floats] * 4 + [ints] * 5)
    compiled = jaxcomm.wire.account(jax.jit(step).lower(W, state, X))
    assert len({c.group for c in compiled.collectives}) <= 3


def with_one(metric: Callable[[jax.Array], Any]) -> Any:
    return lambda w, x: (jnp.mean(x @ w), {"n": metric(x @ w)})


WINDOWS: Any = {"gradients": functools.partial(window_gradients, has_aux=True)}
MISTAKES: list[Any] = [
    (lambda far: 3, {}, r"`aux\['n'\]` is int.*`jaxcomm.metrics.sum\(n\)"),
    (lambda far: jnp.uint8(3), WINDOWS, r"`aux\['n'\]` is uint8.*`jaxcomm.metrics.sum\(n\)"),
    (jaxcomm.metrics.sum, {}, r"`aux\['n'\]` has .* one value per .* return its sum, or"),
]


@PLACES
@pytest.mark.parametrize(("metric", "options", "message"), MISTAKES)
def test_mistakes(where: str, metric: Any, options: Any, message: str) -> None:
    step, state = build(where, with_one(metric), **options)
    batch = (X[:, None], np.ones(N, np.int32)) if options else X
    with pytest.raises(ValueError, match=message):
        step(W, state, batch)


def test_an_integer_of_each_worker_needs_no_reduction() -> None:
    step, state = build("auto 4", with_one(len), metrics="own")
    np.testing.assert_array_equal(step(W, state, X)[2]["n"], np.full(N, 8))
