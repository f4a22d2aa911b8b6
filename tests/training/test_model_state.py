"""Model state: means over workers or each worker's own, against NumPy, wherever a step runs."""

import functools
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

import jaxcomm
from jaxcomm.synchronization import local_sgd, window_gradients
from tests.training.test_metrics import COLLECTIVE

N, ROWS, STEPS = 8, 16, 3
KINDS = ["simulated", "Auto", "Explicit"]


def workers_of(kind: str, count: int = N) -> Any:
    if kind == "simulated":
        return count
    types = (AxisType[kind],)
    return jax.make_mesh((count,), ("data",), axis_types=types, devices=jax.devices()[:count])


def make(loss: Any, tx: Any, workers: Any, **options: Any) -> Any:
    build: Any = jaxcomm.make_step if isinstance(workers, Mesh) else jaxcomm.simulate
    return build(loss, tx, workers, has_model_state=True, donate=False, **options)


def batches() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(STEPS, ROWS, 3)).astype(np.float32)


def start() -> tuple[Any, Any]:
    params = {"w": jnp.linspace(-1, 1, 3)}
    state = {
        "mean": jnp.ones(3),
        "half": jnp.ones(3, jnp.bfloat16),
        "count": jnp.int32(0),
        "key": jax.random.key(3),
    }
    return params, state


def decayed(state: Any, rows: Any) -> Any:
    mean = 0.9 * state["mean"] + 0.1 * jnp.mean(rows, axis=0)
    key, _ = jax.random.split(state["key"])
    half = mean.astype(jnp.bfloat16)
    return {"mean": mean, "half": half, "count": state["count"] + 1, "key": key}


def loss_fn(params: Any, state: Any, rows: Any) -> Any:
    centered = rows - lax.stop_gradient(state["mean"])[None]
    return jnp.mean((centered @ params["w"]) ** 2), decayed(state, rows)


def exact() -> Any:
    return optax.chain(jaxcomm.mean(), optax.sgd(0.1))


def expected_means(workers: int) -> np.ndarray:
    """The running means of each worker, [workers, 3], if each keeps its own."""
    state = np.ones((workers, 3))
    for rows in batches().astype(np.float64):
        state = 0.9 * state + 0.1 * rows.reshape(workers, -1, 3).mean(axis=1)
    return state


@pytest.mark.quick(1)
@pytest.mark.parametrize("count", [1, N])
@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_over_workers(kind: str, count: int) -> None:
    workers = workers_of(kind, count)
    params, state = start()
    step = make(loss_fn, exact(), workers)
    opt_state = jaxcomm.init(exact(), params, workers)

    def train(carry: Any, rows: jax.Array) -> Any:
        *carry, metrics = step(*carry, rows)
        return tuple(carry), metrics["loss"]

    (params, state, _), losses = jax.jit(functools.partial(lax.scan, train))(
        (params, state, opt_state), batches()
    )
    # Equal parts of a batch: the mean of their means is the mean of the batch.
    np.testing.assert_allclose(state["mean"], expected_means(1)[0], rtol=1e-5)
    half = np.float32(state["half"])
    np.testing.assert_allclose(half, expected_means(1)[0], rtol=2**-7)
    assert state["count"] == STEPS
    key = start()[1]["key"]
    for _ in range(STEPS):
        key = jax.random.split(key)[0]
    assert (jax.random.key_data(state["key"]) == jax.random.key_data(key)).all()
    # Training is that of one device which sees the whole batch.
    alone, running = np.linspace(-1, 1, 3), np.ones(3)
    for rows, loss in zip(batches().astype(np.float64), losses, strict=True):
        errors = (rows - running) @ alone
        np.testing.assert_allclose(loss, np.mean(errors**2), rtol=1e-5)
        alone = alone - 0.1 * 2 * np.mean(errors[:, None] * (rows - running), axis=0)
        running = 0.9 * running + 0.1 * rows.mean(axis=0)
    np.testing.assert_allclose(params["w"], alone, rtol=1e-4, atol=1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
def test_each_workers_own(kind: str) -> None:
    workers = workers_of(kind)
    params, state = start()
    own = jaxcomm.replicate(state, workers)
    step = make(loss_fn, exact(), workers)
    opt_state = jaxcomm.init(exact(), params, workers)
    for rows in batches():
        params, own, opt_state, _ = step(params, own, opt_state, rows)
    np.testing.assert_allclose(own.per_worker["data"]["mean"], expected_means(N), rtol=1e-5)
    assert own.per_worker["data"]["count"].tolist() == [STEPS] * N
    mean = jaxcomm.consensus(own)
    np.testing.assert_allclose(mean["mean"], expected_means(N).mean(axis=0), rtol=1e-5)
    assert mean["count"] == STEPS and mean["count"].dtype == jnp.int32
    assert mean["key"].dtype == state["key"].dtype


def test_what_each_worker_keeps_is_not_sent() -> None:
    tx, mesh = optax.chain(optax.sgd(0.1), local_sgd(4)), workers_of("Auto")
    params, state = (jaxcomm.replicate(tree, mesh) for tree in start())
    opt_state = jaxcomm.init(tx, params, mesh)
    step = make(loss_fn, tx, mesh, metrics="own")
    text = jax.jit(step).lower(params, state, opt_state, batches()[0]).compile().as_text()
    branches = text.count("conditional(")
    outside = [
        line
        for line in text.splitlines()
        if COLLECTIVE.search(line) and "/cond/" not in line and "branch_" not in line
    ]
    assert branches and not outside


def test_bytes_of_the_mean() -> None:
    mesh = workers_of("Auto")
    params, state = start()
    opt_state = jaxcomm.init(exact(), params, mesh)

    def sent(loss: Any, state: Any) -> float:
        return jaxcomm.wire.account(
            make(loss, exact(), mesh), params, state, opt_state, batches()[0]
        ).bytes_per_worker

    # Two leaves of 3 values differ by worker; those that do not are not sent.
    plain = sent(lambda p, s, b: (loss_fn(p, s, b)[0], s), state)
    assert sent(loss_fn, state) - plain == 2 * 3 * 4 * 2 * (N - 1) / N

    def synchronized(params: Any, state: Any, rows: Any) -> Any:
        loss, new = loss_fn(params, state, rows)
        return loss, {**new, "mean": lax.pmean(new["mean"], "data"), "half": state["half"]}

    assert sent(synchronized, state) - plain == 3 * 4 * 2 * (N - 1) / N  # Its own mean only.


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["simulated", "Auto"])
@pytest.mark.parametrize("own", [False, True])
def test_weights(kind: str, own: bool) -> None:
    workers = workers_of(kind)
    valid = np.array([2, 2, 2, 0, 1, 0, 2, 2], np.float32)
    rows = batches()[0].reshape(N, 2, 3)
    rows[valid == 0] = np.nan  # Of a worker without valid examples nothing may leak.

    def gradients(loss_fn: Any, params: Any, batch: Any, *, model_state: Any) -> Any:
        rows, weight = batch
        value, gradient = jaxcomm.local_value_and_grad(loss_fn, has_aux=True)(
            params, model_state, rows
        )
        return value, gradient, weight[0]

    params, state = start()
    opt_state = jaxcomm.init(exact(), params, workers)
    given = jaxcomm.replicate(state, workers) if own else state
    step = make(loss_fn, exact(), workers, gradients=gradients)
    _, new, _, metrics = step(params, given, opt_state, (rows.reshape(-1, 3), valid))
    each = 0.9 + 0.1 * rows.mean(axis=1)
    if own:
        each[valid == 0] = 1
        np.testing.assert_allclose(new.per_worker["data"]["mean"], each, rtol=1e-5)
    else:
        mean = np.average(each[valid > 0], axis=0, weights=valid[valid > 0])
        np.testing.assert_allclose(new["mean"], mean, rtol=1e-5)
    assert metrics["weight"] == valid.sum() and np.isfinite(metrics["loss"])
    if not own:
        kept = step(params, state, opt_state, (batches()[0], np.zeros(N, np.float32)))[1]
        np.testing.assert_array_equal(kept["mean"], state["mean"])


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["simulated", "Auto"])
@pytest.mark.parametrize("own", [False, True])
def test_one_workers_nan(kind: str, own: bool) -> None:
    workers = workers_of(kind)
    tx = jaxcomm.skip_nonfinite(exact())
    params, state = start()
    opt_state = jaxcomm.init(tx, params, workers)
    rows = batches()[0].reshape(N, 2, 3)
    rows[5, 0, 1] = np.nan
    given = jaxcomm.replicate(state, workers) if own else state
    step = make(loss_fn, tx, workers)
    after, new, opt_state, metrics = step(params, given, opt_state, rows.reshape(-1, 3))
    assert np.isnan(metrics["loss"])
    chex.assert_trees_all_equal(after, params)
    if own:
        each = 0.9 + 0.1 * rows.mean(axis=1)
        each[5] = 1
        np.testing.assert_allclose(new.per_worker["data"]["mean"], each, rtol=1e-5)
    else:
        np.testing.assert_array_equal(new["mean"], state["mean"])
    _, new, _, metrics = step(after, new, opt_state, batches()[1])
    assert np.isfinite(metrics["loss"])
    assert all(
        np.isfinite(x).all()
        for x in jax.tree.leaves(
            jax.tree.map(np.float32, (new.per_worker["data"]["mean"] if own else new["mean"]))
        )
    )


@pytest.mark.slow
def test_devices_of_one_worker() -> None:
    for own in (False, True):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        params, state = start()
        given = jaxcomm.replicate(state, mesh) if own else state
        step = make(loss_fn, exact(), mesh)
        opt_state = jaxcomm.init(exact(), params, mesh)
        for rows in batches():
            params, given, opt_state, _ = step(params, given, opt_state, rows)
        got = given.per_worker["data"]["mean"] if own else given["mean"][None]
        np.testing.assert_allclose(got, expected_means(4 if own else 1), rtol=1e-5)


def test_beside_nested_stages() -> None:
    """Two stages of aggregation over two axes; all devices are workers."""
    axes = ("dcn", "ici")
    mesh = jax.make_mesh((2, 4), axes, axis_types=(AxisType.Auto,) * 2)
    stages = jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.mean("dcn"))
    for own in (False, True):
        tx = optax.chain(stages, optax.sgd(0.1))
        params, state = start()
        given = jaxcomm.replicate(state, mesh, axis_name=axes) if own else state
        step = make(loss_fn, tx, mesh, axis_name=axes)
        opt_state = jaxcomm.init(tx, params, mesh)
        for rows in batches():
            params, given, opt_state, _ = step(params, given, opt_state, rows)
        got = given.per_worker["dcn,ici"]["mean"] if own else given["mean"][None]
        np.testing.assert_allclose(got, expected_means(N if own else 1), rtol=1e-5)


class Normalized(nn.Module):
    axis_name: str | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nn.Dense(4)(x)
        hidden = nn.BatchNorm(False, momentum=0.9, axis_name=self.axis_name)(hidden)
        return nn.Dense(1)(nn.relu(hidden))[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["simulated", "Auto"])
def test_batch_norm_over_all_workers_is_that_of_one_device(kind: str) -> None:
    workers, outcomes = workers_of(kind), []
    variables = Normalized(None).init(jax.random.key(0), jnp.ones((2, 3)))
    for where, axis_name in ((workers_of("simulated", 1), None), (workers, "data")):
        model = Normalized(axis_name)

        def loss(params: Any, statistics: Any, x: Any, model: Any = model) -> Any:
            out, new = model.apply(
                {"params": params, "batch_stats": statistics}, x, mutable=["batch_stats"]
            )
            return jnp.mean((out - jnp.sum(x, axis=1)) ** 2), new["batch_stats"]

        params, statistics = variables["params"], variables["batch_stats"]
        step = make(loss, exact(), where)
        opt_state = jaxcomm.init(exact(), params, where)
        for rows in batches():
            params, statistics, opt_state, _ = step(params, statistics, opt_state, rows)
        outcomes.append((params, statistics))
    chex.assert_trees_all_close(*outcomes, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("kind", ["simulated", "Auto"])
def test_windows_pass_the_state_from_one_minibatch_to_the_next(kind: str) -> None:
    workers = workers_of(kind, 2)
    finished = np.array([1, 3], np.int32)
    rows = np.random.default_rng(1).normal(size=(2, 3, 4, 3)).astype(np.float32)

    def loss(params: Any, mean: Any, batch: Any) -> Any:
        return loss_fn(params, {**start()[1], "mean": mean}, batch)[0], (
            0.9 * mean + 0.1 * jnp.mean(batch, axis=0),
            {"first": batch[0, 0]},
        )

    params, _ = start()
    step = make(
        loss,
        exact(),
        workers,
        has_aux=True,
        gradients=functools.partial(window_gradients, has_aux=True),
    )
    opt_state = jaxcomm.init(exact(), params, workers)
    _, new, _, metrics = step(params, jnp.ones(3), opt_state, (rows.reshape(6, 4, 3), finished))
    each = []
    for own, count in zip(rows, finished, strict=True):
        mean = np.ones(3)
        for minibatch in own[:count]:
            mean = 0.9 * mean + 0.1 * minibatch.mean(axis=0)
        each.append(mean)
    np.testing.assert_allclose(new, np.average(each, axis=0, weights=finished), rtol=1e-5)
    firsts = [rows[i, j, 0, 0] for i in range(2) for j in range(finished[i])]
    np.testing.assert_allclose(metrics["first"], np.mean(firsts), rtol=1e-5)


@pytest.mark.parametrize("kind", ["simulated", "Auto"])
def test_a_running_minimum_starts_at_infinity(kind: str) -> None:
    workers, (params, _) = workers_of(kind, 2), start()
    never = jnp.float32(jnp.inf)  # The second minimum stays infinite.

    def loss(params: Any, least: jax.Array, rows: jax.Array) -> Any:
        return jnp.mean(rows @ params["w"]), jnp.minimum(least, jnp.stack([rows.min(), never]))

    step, opt_state = make(loss, exact(), workers), jaxcomm.init(exact(), params, workers)
    rows = batches()[0]
    _, least, _, _ = step(params, jnp.stack([never, never]), opt_state, rows)
    np.testing.assert_allclose(least[0], np.mean(rows.reshape(2, -1).min(axis=1)), rtol=1e-6)
    assert least[1] == np.inf


def test_a_sharded_model_state_is_refused_by_its_type() -> None:
    mesh, (params, _) = workers_of("Explicit"), start()
    step = make(lambda p, s, b: (jnp.mean(b @ p["w"]), s), exact(), mesh)
    opt_state = jaxcomm.init(exact(), params, mesh)
    state = jax.device_put(jnp.zeros(N), jax.NamedSharding(mesh, jax.P("data")))
    for run in (step, jax.jit(step)):
        with pytest.raises(ValueError, match="model_state is sharded over devices"):
            run(params, state, opt_state, batches()[0])


@pytest.mark.filterwarnings("error")
def test_numbers_of_python() -> None:
    params, _ = start()
    step = make(lambda p, s, b: (jnp.mean(b @ p["w"]), {"a": 0.25, "b": 3}), exact(), 2)
    state = {"a": 1.0, "b": 2}
    for _ in range(2):
        _, state, _, _ = step(params, state, jaxcomm.init(exact(), params, 2), batches()[0])
    assert state == {"a": 0.25, "b": 3} and state["a"].dtype == jnp.float32


@pytest.mark.parametrize("kind", ["simulated", "Auto"])
def test_what_the_loss_does_not_change_keeps_its_bits(kind: str) -> None:
    workers, params = workers_of(kind, 7), start()[0]
    rows = np.random.default_rng(2).normal(size=(7, 3)).astype(np.float32)
    state = jnp.asarray(rows.ravel() ** 3)
    step = make(lambda p, s, b: (jnp.mean(b @ p["w"]), s), exact(), workers)
    _, after, _, _ = step(params, state, jaxcomm.init(exact(), params, workers), rows)
    np.testing.assert_array_equal(after, state)


def test_distance_of_a_model_state() -> None:
    own = jaxcomm.PerWorker(
        {
            "data": {
                "mean": jnp.array([1.0, 4.0]),
                "count": jnp.array([1, 9]),
                "key": jax.random.split(jax.random.key(0)),
            }
        }
    )
    assert jaxcomm.consensus_distance(own) == 4.5


@pytest.mark.parametrize("kind", ["simulated", "Auto"])
def test_one_array_as_parameters_and_model_state_is_donated_once(kind: str) -> None:
    build: Any = jaxcomm.simulate if kind == "simulated" else jaxcomm.make_step
    step = build(
        lambda w, s, b: (jnp.mean((b @ w) ** 2), s + 1),
        exact(),
        workers_of(kind),
        has_model_state=True,
    )
    shared = jnp.arange(3.0)
    opt_state = jaxcomm.init(exact(), shared, workers_of(kind))
    params, state, opt_state, _ = step(shared, shared, opt_state, batches()[0])
    assert state.tolist() == [1, 2, 3]
    params, _, _, _ = step(params, params, opt_state, batches()[1])
    assert np.isfinite(params).all() and shared.is_deleted()
