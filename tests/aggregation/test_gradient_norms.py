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
from jaxcomm.synchronization import local_sgd
from tests.workers import mesh_of

N = 4
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
KINDS = pytest.mark.parametrize("kind", ["mesh", "simulated"])
START = {"a": np.ones(2, np.float32), "b": np.float32(1)}


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(x[:, :2] @ params["a"] + params["b"] * x[:, 2] - 1))


def own_gradients(x: np.ndarray = X, workers: int = N) -> np.ndarray:
    rows = x.astype(np.float64).reshape(workers, -1, 3)
    return np.stack([2 * (r * (r @ np.ones(3) - 1)[:, None]).mean(0) for r in rows])


def build(kind: str, tx: Any, loss: Any = loss_fn, **options: Any) -> Any:
    workers: Any = mesh_of(N) if kind == "mesh" else N
    make: Any = jaxcomm.make_step if kind == "mesh" else jaxcomm.simulate
    return make(loss, tx, workers, donate=False, **options), jaxcomm.init(tx, START, workers)


def norms(metrics: dict[str, Any]) -> list[float]:
    names = ("worker_gradient_norm", "gradient_norm")
    return [float(metrics[f"diagnostics/{name}"]) for name in names]


def right(gradients: np.ndarray, weights: Any = None) -> list[float]:
    squares = np.sum(np.square(gradients), axis=-1)
    mean = np.average(gradients, axis=0, weights=weights)
    return [np.sqrt(np.average(squares, weights=weights)), np.linalg.norm(mean)]


@KINDS
def test_of_the_exact_mean(kind: str) -> None:
    tx = optax.chain(jaxcomm.gradient_norms(jaxcomm.mean()), optax.clip_by_global_norm(0.1))
    step, state = build(kind, tx)
    assert not any(jax.tree.leaves(state[0].diagnostics))
    metrics = step(START, state, X)[2]
    np.testing.assert_allclose(norms(metrics), right(own_gradients()), rtol=1e-5)


@KINDS
def test_with_weights(kind: str) -> None:
    def gradients(loss_fn: Any, params: Any, batch: Any) -> Any:
        loss, gradient = jaxcomm.local_value_and_grad(loss_fn)(params, batch[0])
        bad = jnp.where(batch[1][0] == 0, jnp.nan, 1)
        return loss, jax.tree.map(lambda g: g * bad, gradient), batch[1][0]

    step, state = build(kind, jaxcomm.gradient_norms(jaxcomm.mean()), gradients=gradients)
    weights = np.array([0, 1, 2, 5], np.float32)
    metrics = step(START, state, (X, weights))[2]
    np.testing.assert_allclose(norms(metrics), right(own_gradients(), weights), rtol=1e-5)


def test_of_what_a_codec_makes_of_it_and_its_bytes() -> None:
    plain = jaxcomm.global_qsgd(bits=8)
    results = []
    for aggregator in (plain, jaxcomm.gradient_norms(plain)):
        step, state = build("mesh", optax.chain(aggregator, optax.sgd(1.0)))
        sent = jaxcomm.wire.account(step, START, state, X).bytes_per_worker
        results.append((sent, *step(START, state, X)[::2]))
    (bytes_without, after, _), (bytes_with, same, metrics) = results
    assert bytes_with - bytes_without == 4 * 2 * (N - 1) / N
    change = np.concatenate([np.ravel(START[k] - np.asarray(after[k])) for k in START])
    np.testing.assert_array_equal(same["a"], after["a"])
    expected = [right(own_gradients())[0], np.linalg.norm(change)]
    np.testing.assert_allclose(norms(metrics), expected, rtol=1e-5)


def test_over_two_axes_and_inner_devices() -> None:
    sizes = {"dcn": 2, "ici": 2, "inner": 2}
    mesh = jax.make_mesh((2, 2, 2), tuple(sizes), axis_types=(AxisType.Auto,) * 3)
    stages = jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.mean("dcn"))
    tx = jaxcomm.gradient_norms(stages)
    step = jaxcomm.make_step(loss_fn, tx, mesh, axis_name=("dcn", "ici"), donate=False)
    metrics = step(START, jaxcomm.init(tx, START, mesh), X)[2]
    np.testing.assert_allclose(norms(metrics), right(own_gradients()), rtol=1e-5)


@KINDS
def test_inside_accumulate_and_skip_nonfinite(kind: str) -> None:
    tx = optax.chain(jaxcomm.gradient_norms(jaxcomm.mean()), optax.sgd(0.0))
    tx = jaxcomm.skip_nonfinite(jaxcomm.accumulate(tx, 2))
    step, state = build(kind, tx)
    seen = []
    for batch in (X, -X, np.full_like(X, np.nan), X):
        _, state, metrics = step(START, state, batch)
        found = {k.rsplit("/")[-1]: float(v) for k, v in metrics.items()}
        seen.append([found["worker_gradient_norm"], found["gradient_norm"]])
    expected = right((own_gradients() + own_gradients(-X)) / 2)
    np.testing.assert_allclose(seen, [[0, 0], *[expected] * 3], rtol=1e-5)


def test_resized_and_as_the_aggregator_of_local_steps() -> None:
    tx = optax.chain(jaxcomm.gradient_norms(jaxcomm.top_k_sgd(ratio=0.5)), optax.sgd(0.1))
    step, state = build("simulated", tx)
    params, state, metrics = step(START, state, X)
    smaller, params = jaxcomm.resize_workers(tx, state, params, 2)
    kept = smaller[0].diagnostics["gradient_norm"]
    assert kept == metrics["diagnostics/gradient_norm"]
    params, *_ = jaxcomm.simulate(loss_fn, tx, 2)(params, smaller, X)
    assert np.isfinite(params["a"]).all()

    tx = optax.chain(
        optax.sgd(0.5), local_sgd(1, aggregator=jaxcomm.gradient_norms(jaxcomm.mean()))
    )
    replicas = jaxcomm.replicate(START, N)
    step = jaxcomm.simulate(loss_fn, tx, N)
    found = step(replicas, jaxcomm.init(tx, replicas, N), X)[2]
    found = {k.rsplit("/")[-1]: float(v) for k, v in found.items()}
    displaced = [found["worker_gradient_norm"], found["gradient_norm"]]
    np.testing.assert_allclose(displaced, np.multiply(0.5, right(own_gradients())), rtol=1e-5)


def test_mistakes() -> None:
    norms_of = jaxcomm.gradient_norms
    with pytest.raises(ValueError, match="`gradient_norms` takes aggregators"):
        norms_of(jaxcomm.accumulate(jaxcomm.mean(), 2))
    with pytest.raises(ValueError, match="gradients at once: leave out norms"):
        jaxcomm.scheduling.wait_free(norms_of(jaxcomm.mean()))
    step, state = build("simulated", norms_of(jaxcomm.zeroth_order()))
    with pytest.raises(ValueError, match="`zeroth_order` evaluates the loss itself"):
        step(START, state, X)
    tx = jaxcomm.hierarchical(norms_of(jaxcomm.mean("ici")), jaxcomm.mean("dcn"))
    sizes = {"dcn": 2, "ici": 2}
    make = functools.partial(jaxcomm.simulate, loss_fn, tx, sizes, axis_name=("dcn", "ici"))
    with pytest.raises(ValueError, match="place it around `hierarchical`"):
        make()(START, jaxcomm.init(tx, START, sizes), X)
