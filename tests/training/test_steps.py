"""Training steps: right numbers, and mistakes that are errors."""

import os
import subprocess
import sys
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomm
from jaxcomm.training._arguments import unshared
from tests.workers import mesh_of

N = 4
MESH = mesh_of(N)


def loss_fn(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def data(size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(size, 5)).astype(np.float32), rng.normal(size=size).astype(np.float32)


def start() -> dict[str, jax.Array]:
    return {"w": jnp.linspace(-1, 1, 5), "b": jnp.float32(0.5)}


def build(kind: str, loss: Any, tx: Any, **options: Any) -> tuple[Any, Any]:
    if kind == "mesh":
        return jaxcomm.make_step(loss, tx, MESH, **options), MESH
    return jaxcomm.simulate(loss, tx, N, **options), N


KINDS = pytest.mark.parametrize("kind", ["mesh", "simulated"])


@KINDS
def test_the_mean_trains_like_one_device(kind: str) -> None:
    tx = optax.chain(jaxcomm.mean(), optax.rmsprop(0.1))
    step, workers = build(kind, loss_fn, tx)
    params, state = start(), jaxcomm.init(tx, start(), workers)
    alone, alone_state = start(), optax.rmsprop(0.1).init(start())
    for _ in range(10):
        params, state, metrics = step(params, state, data())
        loss, gradient = jax.value_and_grad(loss_fn)(alone, data())
        updates, alone_state = optax.rmsprop(0.1).update(gradient, alone_state)
        alone = optax.apply_updates(alone, updates)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
    chex.assert_trees_all_close(params, alone, rtol=1e-4, atol=1e-5)


@KINDS
@pytest.mark.parametrize("has_aux", [False, True])
def test_a_loss_that_averages_over_workers_itself_has_the_same_gradient(
    kind: str, has_aux: bool
) -> None:
    def averaged(params: Any, batch: Any) -> Any:
        loss = jax.lax.pmean(loss_fn(params, batch), "data")
        return (loss, {"twice": 2 * loss}) if has_aux else loss

    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
    step, workers = build(kind, averaged, tx, has_aux=has_aux)
    params, _, metrics = step(start(), jaxcomm.init(tx, start(), workers), data())
    loss, gradient = jax.value_and_grad(loss_fn)(start(), data())
    alone = jax.tree.map(lambda p, g: p - 0.1 * g, start(), gradient)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
    chex.assert_trees_all_close(params, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("shape", [(1, 1), (2, 4)])
def test_so_it_has_nested_on_every_mesh(shape: tuple[int, int], kind: Any, dtype: Any) -> None:
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh = jax.make_mesh(shape, ("node", "core"), axis_types=(kind, kind), devices=devices)
    axes = mesh.axis_names
    tx = optax.chain(
        jaxcomm.hierarchical(jaxcomm.mean("core"), jaxcomm.mean("node")), optax.sgd(0.1)
    )
    averaged = lambda params, batch: jax.lax.pmean(loss_fn(params, batch), axes)  # noqa: E731
    first = jax.tree.map(lambda x: jnp.asarray(x, dtype), (start(), data()))

    def trained(loss: Any) -> Any:
        step = jaxcomm.make_step(loss, tx, mesh, axis_name=axes, donate=False)
        carry = first[0], jaxcomm.init(tx, first[0], mesh, axis_name=axes)
        return jax.lax.scan(lambda c, _: (step(*c, first[1])[:2], None), carry, None, 2)[0][0]

    rtol = 1e-5 if dtype == jnp.float32 else 2e-2
    chex.assert_trees_all_close(trained(averaged), trained(loss_fn), rtol=rtol)


@KINDS
def test_numbers_of_python_are_parameters_too(kind: str) -> None:
    params = {"w": 2.0, "b": np.float64(0.5)}
    tx = optax.chain(jaxcomm.global_qsgd(bits=16), optax.sgd(0.1, momentum=0.9))
    step, workers = build(kind, lambda p, batch: jnp.mean(p["w"] * batch + p["b"]), tx)
    new, _, _ = step(params, jaxcomm.init(tx, params, workers), np.ones(N, np.float32))
    np.testing.assert_allclose([new["w"], new["b"]], [1.9, 0.4], rtol=1e-4)


def test_mesh_and_simulator_train_alike() -> None:
    tx = optax.chain(jaxcomm.global_qsgd(bits=16), optax.sgd(0.05, momentum=0.9))
    outcomes = []
    for kind in ("mesh", "simulated"):
        step, workers = build(kind, loss_fn, tx)
        params, state = start(), jaxcomm.init(tx, start(), workers)
        for _ in range(20):
            params, state, _ = step(params, state, data())
        outcomes.append(params)
    chex.assert_trees_all_close(*outcomes, atol=2e-4)


@KINDS
def test_aux_is_averaged_beside_the_loss(kind: str) -> None:
    def with_aux(params: Any, batch: Any) -> Any:
        return loss_fn(params, batch), {"first": batch[1][0], "share": jnp.bool_(True)}

    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
    step, workers = build(kind, with_aux, tx, has_aux=True)
    _, _, metrics = step(start(), jaxcomm.init(tx, start(), workers), data())
    assert set(metrics) == {"loss", "first", "share"}
    np.testing.assert_allclose(metrics["first"], data()[1][::4].mean(), rtol=1e-6)
    assert metrics["share"] == 1 and metrics["share"].dtype == jnp.float32


@KINDS
def test_aux_with_a_loss(kind: str) -> None:
    tx, aux = jaxcomm.mean(), {"loss": jnp.float32(0)}
    step, workers = build(kind, lambda p, b: (loss_fn(p, b), aux), tx, has_aux=True)
    with pytest.raises(ValueError, match=r"The step adds the metrics \['loss'\]"):
        step(start(), jaxcomm.init(tx, start(), workers), data())


@KINDS
def test_each_worker_gets_its_own_key(kind: str) -> None:
    def noisy(params: Any, batch: Any, key: jax.Array) -> Any:
        draw = jax.random.uniform(key)
        return loss_fn(params, batch), {"draw": draw, "square": draw**2}

    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
    step, workers = build(kind, noisy, tx, has_aux=True)
    key = jax.random.key(3)
    _, _, metrics = step(start(), jaxcomm.init(tx, start(), workers), data(), key=key)
    own = [float(jax.random.uniform(jax.random.fold_in(key, i))) for i in range(N)]
    np.testing.assert_allclose(metrics["draw"], np.mean(own), rtol=1e-6)
    np.testing.assert_allclose(metrics["square"], np.mean(np.square(own)), rtol=1e-6)


@KINDS
@pytest.mark.parametrize("aggregate", [jaxcomm.mean, jaxcomm.qsgd])
def test_gradients_with_weights(kind: str, aggregate: Any) -> None:
    # Each worker counts its valid samples; the weighted mean is the mean over all valid samples.
    x, y = data()
    valid = np.array([1] * 4 + [1, 0, 0, 0] + [0] * 4 + [1, 1, 1, 0], np.float32)

    def gradients(loss_fn: Any, params: Any, batch: Any) -> Any:
        x, y, valid = batch

        def masked(params: Any) -> jax.Array:
            errors = (x @ params["w"] + params["b"] - y) ** 2
            return jnp.sum(errors * valid) / jnp.sum(valid)  # NaN where nothing is valid.

        loss, gradient = jaxcomm.local_value_and_grad(masked)(params)
        return jnp.where(jnp.sum(valid) > 0, loss, 0), gradient, jnp.sum(valid)

    tx = optax.chain(aggregate(), optax.sgd(1.0))
    step, workers = build(kind, loss_fn, tx, gradients=gradients)
    before = start()
    after, _, metrics = step(start(), jaxcomm.init(tx, before, workers), (x, y, valid))
    kept = valid > 0
    loss, gradient = jax.value_and_grad(loss_fn)(before, (x[kept], y[kept]))
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient))
    moved = jax.tree.map(lambda a, b: a - b, before, after)
    chex.assert_trees_all_close(moved, gradient, rtol=1e-5, atol=scale * 8 / 127)


@KINDS
def test_a_forgotten_aggregator(kind: str) -> None:
    tx = optax.sgd(0.1)
    step, workers = build(kind, loss_fn, tx)
    with pytest.raises(ValueError, match=r"update at \['b'\] differs by worker.*jaxcomm\.mean\("):
        step(start(), jaxcomm.init(tx, start(), workers), data())


@KINDS
def test_momentum_before_the_aggregator(kind: str) -> None:
    tx = optax.chain(optax.trace(0.9), jaxcomm.mean(), optax.scale(-0.1))
    step, workers = build(kind, loss_fn, tx)
    with pytest.raises(
        ValueError, match=r"optimizer state at \[0\]\.trace\['b'\] differs by worker"
    ):
        step(start(), jaxcomm.init(tx, start(), workers), data())


@pytest.mark.parametrize("axis_name", ["workers", ("data", "model")])
def test_an_axis_that_the_mesh_lacks(axis_name: Any) -> None:
    with pytest.raises(
        ValueError, match=r"The mesh with axes .* lacks .*: pass `axis_name=` one of its axes"
    ):
        jaxcomm.make_step(loss_fn, jaxcomm.mean(axis_name), MESH, axis_name=axis_name)


@pytest.mark.parametrize("workers", [0, -2, 2.5])
def test_impossible_numbers_of_workers(workers: Any) -> None:
    with pytest.raises(ValueError, match="number of workers must be an int of at least 1"):
        jaxcomm.simulate(loss_fn, jaxcomm.mean(), workers)
    with pytest.raises(ValueError, match="number of workers must be an int of at least 1"):
        jaxcomm.init(jaxcomm.mean(), start(), workers)


def test_simulated_axes_by_name() -> None:
    sizes, axes = {"dcn": 2, "ici": 2}, ("dcn", "ici")
    tx = optax.chain(jaxcomm.mean(axes), optax.sgd(0.1))
    step = jaxcomm.simulate(loss_fn, tx, sizes, axis_name=axes)
    by_name, _, _ = step(start(), jaxcomm.init(tx, start(), sizes, axis_name=axes), data())
    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
    plain = jaxcomm.simulate(loss_fn, tx, 4)
    by_number, _, _ = plain(start(), jaxcomm.init(tx, start(), 4), data())
    chex.assert_trees_all_close(by_name, by_number, rtol=1e-6)
    with pytest.raises(ValueError, match="a dict of sizes by axis"):
        jaxcomm.simulate(loss_fn, tx, 4, axis_name=axes)
    with pytest.raises(ValueError, match="in the same order"):
        jaxcomm.simulate(loss_fn, tx, sizes, axis_name=("ici", "dcn"))


def test_a_mesh_of_explicit_axes_and_arrays_from_anywhere() -> None:
    mesh = jax.make_mesh((N,), ("data",), devices=jax.devices()[:N])
    tx = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.1))
    params = jax.device_put(start(), jax.devices()[5])
    state = jaxcomm.init(tx, params, mesh)
    step = jaxcomm.make_step(loss_fn, tx, mesh)
    params, state, _ = step(params, state, data())
    params, state, metrics = step(params, state, jax.device_put(data(), jax.devices()[3]))
    assert jnp.isfinite(metrics["loss"])


def test_a_second_step_compiles_nothing() -> None:
    tx = optax.chain(jaxcomm.global_qsgd(), optax.rmsprop(0.1))
    step, traced = None, []

    def counting(params: Any, batch: Any) -> jax.Array:
        traced.append(1)
        return loss_fn(params, batch)

    step = jaxcomm.make_step(counting, tx, MESH)
    params, state = start(), jaxcomm.init(tx, start(), MESH)
    params, state, _ = step(params, state, data())
    first = len(traced)
    for _ in range(3):
        params, state, _ = step(params, state, data())
    assert len(traced) == first


def test_donated_state_is_gone_and_kept_state_is_not() -> None:
    tx = optax.chain(jaxcomm.mean(), optax.rmsprop(0.1))
    place = lambda tree: jax.device_put(tree, NamedSharding(MESH, PartitionSpec()))  # noqa: E731
    for donate in (True, False):
        params, state = place(start()), jaxcomm.init(tx, start(), MESH)
        jaxcomm.make_step(loss_fn, tx, MESH, donate=donate)(params, state, data())
        assert params["w"].is_deleted() is donate
        assert state[1][0].nu["w"].is_deleted() is donate


def test_state_specs_by_type_and_by_name() -> None:
    marked = jaxcomm.PerWorker({"dcn,ici": {"w": jnp.zeros((4, 5))}})
    for tree in ({"a": marked, "b": jnp.zeros(3)}, {"a": marked._asdict(), "b": jnp.zeros(3)}):
        specs = jaxcomm.state_specs(tree)
        leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        assert leaves == [PartitionSpec(("dcn", "ici")), PartitionSpec()]


ENDLESS = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, jax.numpy as jnp, optax, jaxcomm
from jax.sharding import AxisType

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
tx = optax.chain(jaxcomm.global_qsgd(bucket_bytes=64, norm="l2"), optax.adam(1e-2))
def loss_fn(params, batch):
    loss = sum(jnp.mean((batch @ w) ** 2) for w in params)
    return loss, {f"metric {i}": loss * i for i in range(4)}
params = [jnp.ones((8, 8)) for _ in range(5)]
state = jaxcomm.init(tx, params, mesh)
step = jaxcomm.make_step(loss_fn, tx, mesh, has_aux=True)
batch = jnp.ones((16, 8))
for _ in range(300):
    params, state, metrics = step(params, state, batch)
print("done", float(metrics["loss"]))
"""


def test_a_loop_that_never_waits_does_not_deadlock() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    finished = subprocess.run(
        [sys.executable, "-c", ENDLESS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert finished.stdout.startswith("done")
    assert "may be stuck" not in finished.stderr


SHARED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np, optax, jaxcomm

mesh = jax.make_mesh((2,), ("data",))
x = jax.random.normal(jax.random.key(0), (4, 3))

def pulled(updates, state, params, *, anchor=None, **extra):
    pull = lambda u, p, a: u + 0.1 * (p - a)
    return (updates if anchor is None else jax.tree.map(pull, updates, params, anchor)), state

def loss(params, teacher, x, key=None):
    noise = 0 if key is None else jax.random.normal(key, (3,))
    error = x @ params["w"] - x @ (teacher["w"] + noise) - 1
    return jnp.mean(error**2) + sum(jnp.sum(jnp.square(p)) for p in params.values()), teacher

def arguments(name, whole):
    w = jnp.arange(3.0)
    params, teacher, extra, key = {"w": jax.device_put(w, whole)}, {"w": jnp.ones(3)}, {}, None
    if name == "device_put":
        teacher = {"w": w}
    elif name == "one_device":
        params, teacher = {"w": w}, {"w": jax.device_put(w, jax.devices()[0])}
    elif name == "addressable_data":
        params["v"] = params["w"].addressable_data(0)
    elif name == "shard":
        params["v"] = params["w"].addressable_shards[-1].data
    elif name == "extra":
        extra = {"anchor": params}
    elif name == "key":
        key = teacher["key"] = jax.device_put(jax.random.key(3), whole)
    elif name == "nothing":
        params["empty"] = teacher["empty"] = jnp.zeros((0, 3))
    pull = optax.GradientTransformationExtraArgs(lambda params: (), pulled)
    tx = optax.chain(jaxcomm.mean(), pull, optax.sgd(0.1))
    return tx, params, teacher, extra, key

names = ["device_put", "one_device", "addressable_data", "shard", "extra", "key", "nothing"]
for where in (mesh, 2):
    make = jaxcomm.simulate if where == 2 else jaxcomm.make_step
    whole = jax.devices()[0] if where == 2 else jax.NamedSharding(mesh, jax.P())
    for name in names if where == mesh else ["one_device", "extra"]:
        found = []
        for donate in (True, False):
            tx, params, teacher, extra, key = arguments(name, whole)
            step = make(loss, tx, where, has_model_state=True, donate=donate)
            state = jaxcomm.init(tx, params, where)
            params, teacher, state, _ = step(params, teacher, state, x, key=key, **extra)
            # The next step is correct and must not wait for one that was refused.
            params, _, _, _ = step(params, teacher, state, x, key=key, **extra)
            found.append(params)
        jax.tree.map(np.testing.assert_array_equal, *found)
print("done")
"""


def test_what_is_donated_shares_no_buffer_with_other_arguments() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    finished = subprocess.run(
        [sys.executable, "-c", SHARED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.stdout == "done\n", finished.stderr[-2000:]


@pytest.mark.parametrize("distinct", [False, True])
def test_leaves_that_share_a_buffer_are_copied_and_no_others(distinct: bool) -> None:
    whole = jax.NamedSharding(MESH, jax.P())
    w, key = (jax.device_put(x, whole) for x in (jnp.arange(3.0), jax.random.key(0)))
    donated = {"w": w, "key": key, "own": w + 1, "empty": jnp.zeros(0), "host": np.ones(3)}
    part = w.addressable_shards[-1].data
    found = unshared(
        donated,
        {"x": part},
        jax.random.wrap_key_data(jax.random.key_data(key)),
        2.0,
        distinct=distinct,
    )
    assert {name for name in donated if found[name] is not donated[name]} == {"w", "key"}
    assert found["w"].sharding == w.sharding
    assert found["w"].addressable_shards[-1].data.unsafe_buffer_pointer() != (
        part.unsafe_buffer_pointer()
    )
    np.testing.assert_array_equal(found["w"], w)
    repeated = unshared([w, w])
    assert repeated[0] is w and repeated[1] is not w
