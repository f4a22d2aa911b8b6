"""Gradients of as many mini-batches as are finished, which differ by worker."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.synchronization import (
    GradientSums,
    RealTimeWindow,
    deterministic,
    precomputed_gradients,
    window_gradients,
)
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


@pytest.mark.parametrize("workers", [N, slow(mesh_of(N))])
def test_the_mean_is_over_all_mini_batches_that_are_finished(workers: Any) -> None:
    make: Any = jaxcomm.simulate if workers == N else jaxcomm.make_step
    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
    step = make(loss, tx, workers, gradients=window_gradients, donate=False)
    params, _, metrics = step(PARAMS, jaxcomm.init(tx, PARAMS, workers), (DATA, FINISHED))
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


def loss_of_one(w: jax.Array, x: jax.Array) -> jax.Array:
    return w * jnp.mean(x).astype(w.dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float32"), slow("float64")])
@pytest.mark.parametrize("add_up", [_in_a_window, slow(_in_a_loop)])
def test_sums_are_in_the_dtype_that_they_need(add_up: Any, dtype: str) -> None:
    tx = optax.chain(jaxcomm.mean(), optax.sgd(1.0))
    with jax.enable_x64(dtype == "float64"):
        after = add_up(tx, jnp.zeros((), dtype))
        assert (after, after.dtype) == (-1, jnp.dtype(dtype))


@pytest.mark.parametrize("what", ["finished", "stale_params", "sums"])
def test_a_worker_gets_one_row(what: str) -> None:
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
