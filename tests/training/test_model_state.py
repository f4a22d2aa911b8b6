"""Model state: means over workers or each worker's own, against NumPy, wherever a step runs."""

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
from jaxcomm.synchronization import window_gradients
from tests.slow import slow
from tests.training.places import SGD, at, begun, mesh_of, normal

N, STEPS = 8, 3
BATCHES = normal(0, STEPS, 16, 3)
PARAMS = {"w": jnp.linspace(-1, 1, 3)}
STATE = {
    "mean": jnp.ones(3),
    "half": jnp.ones(3, jnp.bfloat16),
    "count": jnp.int32(0),
    "key": jax.random.key(3),
}
TWO = pytest.mark.parametrize("where", ["auto", "simulated"])
close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
make = functools.partial(begun, has_model_state=True)


def decayed(state: Any, rows: Any) -> Any:
    mean = 0.9 * state["mean"] + 0.1 * jnp.mean(rows, axis=0)
    key, _ = jax.random.split(state["key"])
    half = mean.astype(jnp.bfloat16)
    return {"mean": mean, "half": half, "count": state["count"] + 1, "key": key}


def loss_fn(params: Any, state: Any, rows: Any) -> Any:
    centered = rows - lax.stop_gradient(state["mean"])[None]
    return jnp.mean((centered @ params["w"]) ** 2), decayed(state, rows)


def expected_means(workers: int) -> np.ndarray:
    """The running means of each worker, [workers, 3], if each keeps its own."""
    state = np.ones((workers, 3))
    for rows in BATCHES.astype(np.float64):
        state = 0.9 * state + 0.1 * rows.reshape(workers, -1, 3).mean(axis=1)
    return state


def trained(where: Any, state: Any = STATE, tx: Any = SGD, **options: Any) -> Any:
    """The model state after all steps."""
    params, (step, opt_state) = PARAMS, make(loss_fn, tx, where, PARAMS, **options)
    for rows in BATCHES:
        params, state, opt_state, _ = step(params, state, opt_state, rows)
    return state


@pytest.mark.parametrize("where", ["auto", *map(slow, ["simulated", "explicit", "auto 1"])])
def test_the_mean_over_workers(where: str) -> None:
    step, opt_state = make(loss_fn, SGD, at(where), PARAMS)

    def train(carry: Any, rows: jax.Array) -> Any:
        *carry, metrics = step(*carry, rows)
        return tuple(carry), metrics["loss"]

    (params, state, _), losses = jax.jit(functools.partial(lax.scan, train))(
        (PARAMS, STATE, opt_state), BATCHES
    )
    # Equal parts of a batch: the mean of their means is the mean of the batch.
    close(state["mean"], expected_means(1)[0])
    np.testing.assert_allclose(np.float32(state["half"]), expected_means(1)[0], rtol=2**-7)
    assert state["count"] == STEPS
    key = STATE["key"]
    for _ in range(STEPS):
        key = jax.random.split(key)[0]
    assert (jax.random.key_data(state["key"]) == jax.random.key_data(key)).all()
    # Training is that of one device which sees the whole batch.
    alone, running = np.linspace(-1, 1, 3), np.ones(3)
    for rows, loss in zip(BATCHES.astype(np.float64), losses, strict=True):
        errors = (rows - running) @ alone
        close(loss, np.mean(errors**2))
        alone = alone - 0.1 * 2 * np.mean(errors[:, None] * (rows - running), axis=0)
        running = 0.9 * running + 0.1 * rows.mean(axis=0)
    np.testing.assert_allclose(params["w"], alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("where", ["auto", *map(slow, ["simulated", "explicit"])])
def test_each_workers_own(where: str) -> None:
    own = trained(at(where), jaxcomm.replicate(STATE, at(where)))
    close(own.per_worker["data"]["mean"], expected_means(N))
    assert own.per_worker["data"]["count"].tolist() == [STEPS] * N
    mean = jaxcomm.consensus(own)
    close(mean["mean"], expected_means(N).mean(axis=0))
    assert mean["count"] == STEPS and mean["count"].dtype == jnp.int32
    assert mean["key"].dtype == STATE["key"].dtype


@pytest.mark.slow
@pytest.mark.parametrize("stages", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_two_axes(stages: bool, own: bool) -> None:
    """Devices of one worker, or workers of two stages of aggregation."""
    mesh = mesh_of(AxisType.Auto, 4, 2)
    axes = ("data", "inner") if stages else ("data",)
    aggregators = [jaxcomm.mean(axis) for axis in reversed(axes)]
    aggregator = jaxcomm.hierarchical(*aggregators) if stages else aggregators[0]
    given = jaxcomm.replicate(STATE, mesh, axis_name=axes) if own else STATE
    state = trained(mesh, given, optax.chain(aggregator, optax.sgd(0.1)), axis_name=axes)
    got = state.per_worker[",".join(axes)]["mean"] if own else state["mean"][None]
    workers = (8 if stages else 4) if own else 1
    close(got, expected_means(workers))


def test_bytes_of_the_mean() -> None:
    def sent(loss: Any, state: Any = STATE) -> float:
        step, opt_state = make(loss, SGD, at("auto"), PARAMS)
        args = (PARAMS, state, opt_state, BATCHES[0])
        return jaxcomm.wire.account(step, *args).bytes_per_worker

    def synchronized(params: Any, state: Any, rows: Any) -> Any:
        loss, new = loss_fn(params, state, rows)
        return loss, {**new, "mean": lax.pmean(new["mean"], "data"), "half": state["half"]}

    # Two leaves of 3 values differ by worker; those that do not are not sent.
    plain = sent(lambda p, s, b: (loss_fn(p, s, b)[0], s))
    assert sent(loss_fn) - plain == 2 * 3 * 4 * 2 * (N - 1) / N
    assert sent(synchronized) - plain == 3 * 4 * 2 * (N - 1) / N  # Its own mean only.
    assert sent(loss_fn, jaxcomm.replicate(STATE, at("auto"))) == plain  # Each keeps its own.


def weighted(loss_fn: Any, params: Any, batch: Any, *, model_state: Any) -> Any:
    """Rows, and the weight of the worker."""
    run = jaxcomm.local_value_and_grad(loss_fn, has_aux=True)
    return *run(params, model_state, batch[0]), batch[1][0]


@TWO
def test_weights(where: str) -> None:
    valid = np.array([2, 2, 2, 0, 1, 0, 2, 2], np.float32)
    rows = BATCHES[0].reshape(N, 2, 3).copy()
    rows[valid == 0] = np.nan  # Of a worker without valid examples nothing may leak.
    each = 0.9 + 0.1 * rows.mean(axis=1)
    each[valid == 0] = 1
    batch = (rows.reshape(-1, 3), valid)
    step, opt_state = make(loss_fn, SGD, at(where), PARAMS, gradients=weighted)
    _, new, _, metrics = step(PARAMS, STATE, opt_state, batch)
    close(new["mean"], np.average(each, axis=0, weights=valid))
    assert metrics["weight"] == valid.sum() and np.isfinite(metrics["loss"])
    nothing = (BATCHES[0], np.zeros(N, np.float32))
    _, kept, _, _ = step(PARAMS, STATE, opt_state, nothing)
    np.testing.assert_array_equal(kept["mean"], STATE["mean"])
    _, own, _, _ = step(PARAMS, jaxcomm.replicate(STATE, at(where)), opt_state, batch)
    close(own.per_worker["data"]["mean"], each)


@TWO
@pytest.mark.parametrize("own", [False, slow(True)])
def test_one_workers_nan(where: str, own: bool) -> None:
    def means(state: Any) -> Any:
        return state.per_worker["data"]["mean"] if own else state["mean"]

    rows = BATCHES[0].reshape(N, 2, 3).copy()
    rows[5, 0, 1] = np.nan
    given = jaxcomm.replicate(STATE, at(where)) if own else STATE
    step, opt_state = make(loss_fn, jaxcomm.skip_nonfinite(SGD), at(where), PARAMS)
    after, new, opt_state, metrics = step(PARAMS, given, opt_state, rows.reshape(-1, 3))
    assert np.isnan(metrics["loss"])
    chex.assert_trees_all_equal(after, PARAMS)
    each = 0.9 + 0.1 * rows.mean(axis=1)
    each[5] = 1
    close(means(new), each if own else STATE["mean"])
    _, new, _, metrics = step(after, new, opt_state, BATCHES[1])
    assert np.isfinite(metrics["loss"]) and np.isfinite(means(new)).all()


@pytest.mark.parametrize("where", ["auto 2", "simulated 2"])
def test_windows_pass_the_state_from_one_minibatch_to_the_next(where: str) -> None:
    finished, rows = np.array([1, 3], np.int32), normal(1, 2, 3, 4, 3)

    def loss(params: Any, mean: Any, batch: Any) -> Any:
        mean = 0.9 * mean + 0.1 * jnp.mean(batch, axis=0)
        return jnp.mean(batch @ params["w"]), (mean, {"first": batch[0, 0]})

    gradients = functools.partial(window_gradients, has_aux=True)
    step, opt_state = make(loss, SGD, at(where), PARAMS, has_aux=True, gradients=gradients)
    batch = (rows.reshape(6, 4, 3), finished)
    _, new, _, metrics = step(PARAMS, jnp.ones(3), opt_state, batch)
    each = np.ones((2, 3))
    for worker, count in enumerate(finished):
        for minibatch in rows[worker, :count]:
            each[worker] = 0.9 * each[worker] + 0.1 * minibatch.mean(axis=0)
    close(new, np.average(each, axis=0, weights=finished))
    firsts = [rows[i, j, 0, 0] for i in range(2) for j in range(finished[i])]
    close(metrics["first"], np.mean(firsts))


@pytest.mark.parametrize("where", ["auto 7", "simulated 7"])
def test_model_state_with_a_running_minimum_and_constants(where: str) -> None:
    """A minimum starts at infinity and may stay there; what is only returned keeps its bits."""
    rows, never = normal(2, 7, 3), jnp.float32(jnp.inf)

    def loss(params: Any, state: Any, rows: jax.Array) -> Any:
        least = jnp.minimum(state["least"], jnp.stack([rows.min(), never]))
        return jnp.mean(rows @ params["w"]), state | {"least": least}

    state = {"least": jnp.stack([never, never]), "kept": jnp.asarray(rows.ravel() ** 3)}
    step, opt_state = make(loss, SGD, at(where), PARAMS)
    _, after, _, _ = step(PARAMS, state, opt_state, rows)
    np.testing.assert_allclose(after["least"], [np.mean(rows.min(axis=1)), np.inf], rtol=1e-6)
    np.testing.assert_array_equal(after["kept"], state["kept"])


@pytest.mark.filterwarnings("error")
def test_python_numbers() -> None:
    loss = lambda p, s, b: (jnp.mean(b @ p["w"]), {"a": 0.25, "b": 3})  # noqa: E731
    step, opt_state = make(loss, SGD, 2, PARAMS)
    state = {"a": 1.0, "b": 2}
    for _ in range(2):
        _, state, _, _ = step(PARAMS, state, opt_state, BATCHES[0])
    assert state == {"a": 0.25, "b": 3} and state["a"].dtype == jnp.float32


def test_distance_of_a_model_state() -> None:
    """Of what is floating-point."""
    own = {"mean": jnp.array([1.0, 4.0]), "count": jnp.array([1, 9])}
    own["key"] = jax.random.split(jax.random.key(0))
    assert jaxcomm.consensus_distance(jaxcomm.PerWorker({"data": own})) == 4.5
