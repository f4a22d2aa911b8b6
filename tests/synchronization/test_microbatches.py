"""Gradients of as many mini-batches as are finished, which differ by worker."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm import gossip
from jaxcomm.synchronization import (
    GradientSums,
    RealTimeWindow,
    deterministic,
    precomputed_gradients,
    window_gradients,
)
from jaxcomm.synchronization._window_gradients import microbatch_gradients
from tests.slow import slow
from tests.workers import mesh_of

N, M, B, SIZE = 4, 3, 2, 5
RNG = np.random.default_rng(0)
DATA = RNG.normal(size=(N * M, B, SIZE)).astype(np.float32)
PARAMS = {"w": jnp.asarray(RNG.normal(size=SIZE), jnp.float32), "b": jnp.float32(0.5)}
FINISHED = np.array([0, 3, 1, 2], np.int32)


def loss(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["w"] + params["b"]) ** 2)


def by_hand(worker: int) -> tuple[float, dict[str, np.ndarray]]:
    """Sums over the finished mini-batches of a worker, in float64."""
    w, b = np.asarray(PARAMS["w"], np.float64), float(PARAMS["b"])
    total, gradient = 0.0, {"w": np.zeros(SIZE), "b": np.zeros(())}
    for batch in DATA[M * worker : M * worker + FINISHED[worker]].astype(np.float64):
        off = batch @ w + b
        total += (off**2).mean()
        gradient["w"] += 2 * (off[:, None] * batch).mean(axis=0)
        gradient["b"] += 2 * off.mean()
    return total, gradient


def test_sums_are_those_of_what_is_finished() -> None:
    def window(microbatches: jax.Array, finished: jax.Array) -> Any:
        return microbatch_gradients(loss, PARAMS, microbatches, finished)

    found = jax.vmap(window, axis_name="data")(jnp.asarray(DATA.reshape(N, M, B, SIZE)), FINISHED)
    for worker in range(N):
        total, gradient = by_hand(worker)
        np.testing.assert_allclose(found.loss[worker], total, rtol=1e-5)
        for name, expected in gradient.items():
            np.testing.assert_allclose(
                found.gradients[name][worker], expected, rtol=1e-5, atol=1e-6
            )
    np.testing.assert_array_equal(found.finished, FINISHED)


def step_of(tx: Any, workers: Any) -> tuple[Any, dict[str, jax.Array]]:
    make = jaxcomm.simulate if isinstance(workers, int) else jaxcomm.make_step
    step = make(loss, tx, workers, gradients=window_gradients, donate=False)
    params, _, metrics = step(PARAMS, jaxcomm.init(tx, PARAMS, workers), (DATA, FINISHED))
    return params, metrics


@pytest.mark.parametrize("workers", [N, "mesh"])
def test_the_mean_is_over_all_mini_batches_that_are_finished(workers: Any) -> None:
    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
    params, metrics = step_of(tx, N if workers == N else mesh_of(N))
    sums = [by_hand(worker) for worker in range(N)]
    for name, x in PARAMS.items():
        mean = sum(gradient[name] for _, gradient in sums) / FINISHED.sum()
        np.testing.assert_allclose(params[name], x - 0.1 * mean, rtol=1e-5, atol=1e-6)
    loss_of_all = sum(total for total, _ in sums) / FINISHED.sum()
    np.testing.assert_allclose(metrics["loss"], loss_of_all, rtol=1e-5)


MANY = 512  # Beyond 256, a sum of ones in bfloat16 stays where it is.


def _in_a_window(tx: Any, params: Any) -> Any:
    batch = (jnp.ones((2 * MANY, 1), jnp.float32), jnp.full(2, MANY, jnp.int32))
    return jaxcomm.simulate(loss_of_one, tx, 2, gradients=window_gradients)(
        params, jaxcomm.init(tx, params, 2), batch
    )[0]


def _in_a_loop(tx: Any, params: Any) -> Any:
    window = RealTimeWindow(
        loss_of_one,
        jaxcomm.make_step(loss_of_one, tx, mesh_of(2), gradients=precomputed_gradients),
        mesh_of(2),
        seconds=float(MANY),
        minibatches=MANY,
        straggler=deterministic([1.0, 1.0]),
    )
    queues = [itertools.repeat(np.ones(1, np.float32))] * 2
    return window(params, jaxcomm.init(tx, params, mesh_of(2)), queues).params


def _in_many_steps(tx: Any, params: Any) -> Any:
    tx = jaxcomm.accumulate(tx, MANY)
    one = jaxcomm.simulate(loss_of_one, tx, 2)

    def body(carry: Any, batch: Any) -> Any:
        return one(*carry, batch)[:2], None

    given = jnp.ones((MANY, 2), jnp.float32)
    return jax.lax.scan(body, (params, jaxcomm.init(tx, params, 2)), given)[0][0]


def loss_of_one(w: jax.Array, x: jax.Array) -> jax.Array:
    return w * jnp.mean(x).astype(w.dtype)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", ["bfloat16", slow("float32"), slow("float64")])
@pytest.mark.parametrize("add_up", [_in_a_window, _in_a_loop, _in_many_steps])
def test_sums_are_in_the_dtype_that_they_need(add_up: Any, dtype: str) -> None:
    tx = optax.chain(jaxcomm.mean(), optax.sgd(1.0))
    with jax.enable_x64(dtype == "float64"):
        after = add_up(tx, jnp.zeros((), dtype))
        assert (after, after.dtype) == (-1, jnp.dtype(dtype))


def test_all_finished_is_the_whole_batch() -> None:
    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
    step = jaxcomm.simulate(loss, tx, N, gradients=window_gradients, donate=False)
    windows, _, _ = step(PARAMS, jaxcomm.init(tx, PARAMS, N), (DATA, np.full(N, M, np.int32)))
    whole = jaxcomm.simulate(loss, tx, N, donate=False)
    plain, _, _ = whole(PARAMS, jaxcomm.init(tx, PARAMS, N), DATA.reshape(N * M * B, SIZE))
    for name in PARAMS:
        np.testing.assert_allclose(windows[name], plain[name], rtol=1e-5, atol=1e-6)


def test_a_window_in_which_nobody_finished_changes_nothing() -> None:
    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
    step = jaxcomm.simulate(loss, tx, N, gradients=window_gradients, donate=False)
    params, _, _ = step(PARAMS, jaxcomm.init(tx, PARAMS, N), (DATA, np.zeros(N, np.int32)))
    for name in PARAMS:
        np.testing.assert_array_equal(params[name], PARAMS[name])


@pytest.mark.slow
def test_with_gossip_who_finished_nothing_only_mixes() -> None:
    """Non-blocking D-PSGD over CHOCO: one expression."""

    def gradients(loss_fn: Any, params: Any, batch: Any) -> Any:
        value, mean, count = window_gradients(loss_fn, params, batch)
        return value, mean, count > 0

    ring = gossip.ring(N)
    every = jaxcomm.compression.sparsifiers.top_k(ratio=1.0)
    tx = optax.chain(optax.sgd(0.1), gossip.choco_sgd(ring, every, step_size=1.0))
    params = jaxcomm.replicate(PARAMS, N)
    step = jaxcomm.simulate(loss, tx, N, gradients=gradients)
    params, _, _ = step(params, jaxcomm.init(tx, params, N), (DATA, FINISHED))
    # Weights are relative to the mean of a worker and its neighbors.
    weights, near = FINISHED > 0, gossip.mixing_matrix(ring) > 0
    relative = weights * near.sum(1) / (near @ weights.astype(int))
    moved = [
        PARAMS["w"] - 0.1 * relative[worker] * by_hand(worker)[1]["w"] / max(FINISHED[worker], 1)
        for worker in range(N)
    ]
    mixed = gossip.mixing_matrix(ring) @ np.stack(moved)
    np.testing.assert_allclose(params.per_worker["data"]["w"], mixed, rtol=1e-5, atol=1e-6)


def test_mistakes() -> None:
    def window(microbatches: Any) -> Any:
        return microbatch_gradients(loss, PARAMS, microbatches, 1)

    wrong = {"a": jnp.ones((1, 2)), "b": jnp.ones((1, 3))}
    with pytest.raises(ValueError, match="too many values"):
        jax.vmap(window, axis_name="data")(wrong)


@pytest.mark.parametrize("what", ["finished", "stale_params", "sums"])
def test_a_worker_is_not_given_several_rows(what: str) -> None:
    """Those of 8 workers, on 4."""
    tx, row = optax.chain(jaxcomm.mean(), optax.sgd(0.1)), np.ones(8, np.float32)
    counts, microbatches = np.ones(4, np.int32), np.ones((4, 1), np.float32)
    gradients, batch = {
        "finished": (window_gradients, (microbatches, np.ones(8, np.int32))),
        "stale_params": (window_gradients, (microbatches, counts, row)),
        "sums": (precomputed_gradients, GradientSums(row, np.ones(8, np.int32), row)),
    }[what]
    step = jaxcomm.simulate(lambda w, x: w * jnp.mean(x), tx, 4, gradients=gradients)
    params = jnp.float32(0)
    with pytest.raises(ValueError, match=rf"`{what}` must have one row .*\[4, "):
        step(params, jaxcomm.init(tx, params, 4), batch)
