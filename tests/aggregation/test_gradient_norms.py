"""Norms before and after aggregation, against NumPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm import gradient_norms
from jaxcomm.synchronization import local_sgd
from tests.aggregation.runs import WHERE, WORKERS, prepared, refuse
from tests.workers import mesh_of

close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
START = {"a": np.ones(2, np.float32), "b": np.float32(1)}
NORMS = gradient_norms(jaxcomm.mean())


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(x[:, :2] @ params["a"] + params["b"] * x[:, 2] - 1))


def own_gradients(x: np.ndarray = X) -> np.ndarray:
    rows = x.astype(np.float64).reshape(WORKERS, -1, 3)
    return np.stack([2 * (r * (r @ np.ones(3) - 1)[:, None]).mean(0) for r in rows])


def norms(metrics: dict[str, Any]) -> list[float]:
    found = {name.rpartition("/")[2]: float(x) for name, x in metrics.items()}
    return [found["worker_gradient_norm"], found["gradient_norm"]]


def right(gradients: np.ndarray, weights: Any = None) -> list[float]:
    squares = np.sum(np.square(gradients), axis=-1)
    mean = np.average(gradients, axis=0, weights=weights)
    return [np.sqrt(np.average(squares, weights=weights)), np.linalg.norm(mean)]


def reported_norms(tx: Any, where: Any, batch: Any = X, **options: Any) -> list[float]:
    step, state = prepared(loss, tx, START, where, **options)
    return norms(step(START, state, batch)[2])


@WHERE
def test_norms_of_the_exact_weighted_mean(where: Any) -> None:
    """Before a clip; a worker of weight 0 may have a NaN."""

    def gradients(loss_fn: Any, params: Any, batch: Any) -> Any:
        x, (weight,) = batch
        value, gradient = jaxcomm.local_value_and_grad(loss_fn)(params, x)
        bad = jnp.where(weight == 0, jnp.nan, 1)
        return value, jax.tree.map(lambda g: g * bad, gradient), weight

    tx, weights = optax.chain(NORMS, optax.clip_by_global_norm(0.1)), np.float32([0, 1, 2, 5])
    close(reported_norms(tx, where), right(own_gradients()))
    found = reported_norms(tx, where, (X, weights), gradients=gradients)
    close(found, right(own_gradients(), weights))


def test_norms_of_encoded_gradients_and_their_bytes() -> None:
    plain, results = jaxcomm.global_qsgd(bits=8), []
    for aggregator in (plain, gradient_norms(plain)):
        tx = optax.chain(aggregator, optax.sgd(1.0))
        step, state = prepared(loss, tx, START, mesh_of(WORKERS))
        sent = jaxcomm.wire.account(step, START, state, X).bytes_per_worker
        results.append((sent, *step(START, state, X)[::2]))
    (bytes_without, after, _), (bytes_with, same, metrics) = results
    assert bytes_with - bytes_without == 4 * 2 * (WORKERS - 1) / WORKERS
    change = np.concatenate([np.ravel(START[k] - np.asarray(after[k])) for k in START])
    np.testing.assert_array_equal(same["a"], after["a"])
    expected = [right(own_gradients())[0], np.linalg.norm(change)]
    close(norms(metrics), expected)


def test_over_two_axes_and_inner_devices() -> None:
    mesh = jax.make_mesh((2, 2, 2), ("dcn", "ici", "inner"), axis_types=(AxisType.Auto,) * 3)
    tx = gradient_norms(jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.mean("dcn")))
    found = reported_norms(tx, mesh, axis_name=("dcn", "ici"))
    close(found, right(own_gradients()))


@WHERE
def test_inside_accumulate_and_skip_nonfinite(where: Any) -> None:
    tx = jaxcomm.skip_nonfinite(jaxcomm.accumulate(optax.chain(NORMS, optax.sgd(0.0)), 2))
    step, state = prepared(loss, tx, START, where)
    seen = []
    for batch in (X, -X, np.full_like(X, np.nan), X):
        _, state, metrics = step(START, state, batch)
        seen.append(norms(metrics))
    expected = right((own_gradients() + own_gradients(-X)) / 2)
    close(seen, [[0, 0], *[expected] * 3])


def test_other_workers_have_the_same_norms() -> None:
    tx = gradient_norms(jaxcomm.top_k_sgd(ratio=0.5))
    step, state = prepared(loss, tx, START, WORKERS)
    params, state, metrics = step(START, state, X)
    smaller, params = jaxcomm.resize_workers(tx, state, params, 2)
    assert smaller.diagnostics["gradient_norm"] == norms(metrics)[1]
    params, *_ = prepared(loss, tx, START, 2)[0](params, smaller, X)
    assert np.isfinite(params["a"]).all()


def test_as_the_aggregator_of_local_steps() -> None:
    tx = optax.chain(optax.sgd(0.5), local_sgd(1, aggregator=NORMS))
    replicas = jaxcomm.replicate(START, WORKERS)
    step, state = prepared(loss, tx, replicas, WORKERS)
    displaced = norms(step(replicas, state, X)[2])
    close(displaced, np.multiply(0.5, right(own_gradients())))


STAGES = jaxcomm.hierarchical(gradient_norms(jaxcomm.mean("ici")), jaxcomm.mean("dcn"))
MISTAKES = {
    "gradients at once: leave out norms": lambda: jaxcomm.scheduling.wait_free(NORMS),
    "`zeroth_order` evaluates the loss itself": lambda: reported_norms(
        gradient_norms(jaxcomm.zeroth_order()), WORKERS
    ),
    "place it around `hierarchical`": lambda: reported_norms(
        STAGES, {"dcn": 2, "ici": 2}, axis_name=("dcn", "ici")
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_named(message: str) -> None:
    refuse(message, MISTAKES[message])
