"""A step wherever it stands: any type of axes, 1 and 8 devices, called, jitted and scanned."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcomm
from jaxcomm import gossip
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.synchronization import diloco

KINDS = [AxisType.Auto, AxisType.Explicit]


def mesh_of(kind: AxisType, *sizes: int, names: tuple[str, ...] = ("data",)) -> Mesh:
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes), devices=devices)


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["w"] - params["b"]) ** 2)


def start() -> Any:
    return {"w": jnp.linspace(-1, 1, 6).reshape(3, 2), "b": jnp.float32(0.5)}


def rows(steps: int = 3) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(steps, 16, 3)).astype(np.float32)


# One that keeps memory by worker, one that permutes, one with exchanges in a conditional.
METHODS: dict[str, Callable[[int], tuple[Any, bool]]] = {
    "feedback": lambda n: (
        optax.chain(jaxcomm.all_gather_mean(error_feedback(top_k(ratio=0.5))), optax.rmsprop(0.1)),
        False,
    ),
    "gossip": lambda n: (optax.chain(optax.sgd(0.1), gossip.dpsgd(gossip.ring(n))), True),
    "local": lambda n: (diloco(optax.sgd(0.1), optax.sgd(0.7), 2), True),
}


def states(method: str, workers: Any, count: int) -> tuple[Any, Any, Any]:
    tx, apart = METHODS[method](count)
    params = jaxcomm.replicate(start(), workers) if apart else start()
    return tx, params, jaxcomm.init(tx, params, workers)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("method", METHODS)
def test_called_jitted_scanned_and_accounted(method: str, devices: int) -> None:
    tx, params, state = states(method, devices, devices)
    step = jaxcomm.simulate(loss_fn, tx, devices, donate=False)
    for batch in rows():
        params, state, _ = step(params, state, batch)
    expected, bytes_sent = params, None
    for kind in KINDS:
        mesh = mesh_of(kind, devices)
        _, params, state = states(method, mesh, devices)
        step = jaxcomm.make_step(loss_fn, tx, mesh, donate=False)
        account = jaxcomm.wire.account(step, params, state, rows()[0])
        assert bytes_sent in (None, account.bytes_per_worker)
        bytes_sent = account.bytes_per_worker

        def train(params: Any, state: Any, batches: Any, step: Any = step) -> Any:
            return jax.lax.scan(lambda c, b: (step(*c, b)[:2], None), (params, state), batches)[0][
                0
            ]

        chex.assert_trees_all_close(jax.jit(train)(params, state, rows()), expected, rtol=1e-5)
        with jax.set_mesh(mesh):
            chex.assert_trees_all_close(jax.jit(train)(params, state, rows()), expected, rtol=1e-5)
        for batch in rows():
            params, state, _ = step(params, state, batch)
        chex.assert_trees_all_close(params, expected, rtol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("devices", [1, 8])
def test_one_compilation(devices: int, kind: AxisType, caplog: pytest.LogCaptureFixture) -> None:
    mesh = mesh_of(kind, devices)
    tx = optax.chain(jaxcomm.mean(), optax.trace(0.9), optax.sgd(0.1))
    for batch in (rows()[0], jnp.asarray(rows()[0])):
        step = jaxcomm.make_step(loss_fn, tx, mesh)
        params, state = start(), jaxcomm.init(tx, start(), mesh)
        with jax.log_compiles():
            for _ in range(3):
                params, state, _ = step(params, state, batch)
        compiled = [
            r for r in caplog.messages if r.startswith("Finished XLA compilation of jit(on_")
        ]
        assert len(compiled) == 1
        caplog.clear()


@pytest.mark.parametrize("kind", [*KINDS, "simulated"])
def test_weak_types_compile_once(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    params = {"w": jnp.full((3, 2), 1.0), "b": jnp.asarray(2.0)}
    assert params["b"].weak_type
    tx = optax.chain(jaxcomm.mean(), optax.trace(0.9), optax.sgd(0.1))
    workers: Any = 8 if kind == "simulated" else mesh_of(kind, 8)
    make: Any = jaxcomm.simulate if kind == "simulated" else jaxcomm.make_step
    step, state = make(loss_fn, tx, workers), jaxcomm.init(tx, params, workers)
    with jax.log_compiles():
        for _ in range(3):
            params, state, _ = step(params, state, rows()[0])
    names = ("on_mesh", "simulated_workers")
    starts = tuple(f"Finished XLA compilation of jit({name})" for name in names)
    assert len([r for r in caplog.messages if r.startswith(starts)]) == 1


@pytest.mark.parametrize("kind", [*KINDS, "simulated"])
def test_an_array_in_two_leaves(kind: Any) -> None:
    shared = jnp.ones((3, 2))
    workers: Any = 8 if kind == "simulated" else mesh_of(kind, 8)
    make: Any = jaxcomm.simulate if kind == "simulated" else jaxcomm.make_step
    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
    loss = lambda p, batch: jnp.mean((batch @ (p["w"] + p["v"])) ** 2)  # noqa: E731
    params = {"w": shared, "v": shared}
    params, _, _ = make(loss, tx, workers)(params, jaxcomm.init(tx, params, workers), rows()[0])
    np.testing.assert_array_equal(params["w"], params["v"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_of_replicas(kind: AxisType) -> None:
    mesh = mesh_of(kind, 8)
    _, params, state = states("local", mesh, 8)
    params, _, _ = jaxcomm.make_step(loss_fn, METHODS["local"](8)[0], mesh)(
        params, state, rows()[0]
    )
    own = np.asarray(params.per_worker["data"]["w"])
    for run in (lambda f: f(params), lambda f: jax.jit(f)(params)):
        np.testing.assert_allclose(run(jaxcomm.consensus)["w"], own.mean(axis=0), rtol=1e-6)
        assert run(jaxcomm.consensus_distance) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_on_one_device_goes_to_all(kind: AxisType) -> None:
    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
    mesh, weight = mesh_of(kind, 8), jax.device_put(jnp.float32(1), jax.devices()[0])
    step = jaxcomm.make_step(loss_fn, tx, mesh)
    step(start(), jaxcomm.init(tx, start(), mesh), rows()[0], weight=weight)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_are_cut_are_not_put_together_in_silence(kind: AxisType) -> None:
    mesh = mesh_of(kind, 2, 4, names=("data", "model"))
    tx = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.1))
    params = start() | {"w": jnp.ones((3, 4))}
    cut = params | {
        "w": jax.device_put(params["w"], NamedSharding(mesh, PartitionSpec(None, "model")))
    }
    with pytest.raises(ValueError, match=r"params\['w'\] is sharded over devices.*shard_local"):
        jaxcomm.init(tx, cut, mesh)
    state = jaxcomm.init(tx, params, mesh)
    with pytest.raises(ValueError, match=r"params\['w'\] is sharded over devices.*shard_local"):
        jaxcomm.make_step(loss_fn, tx, mesh)(cut, state, rows()[0])
    if kind == AxisType.Explicit:  # Auto axes show in no type.
        step = jaxcomm.make_step(loss_fn, tx, mesh, axis_name=("data", "model"))
        with pytest.raises(ValueError, match=r"params\['w'\] is sharded over devices.*shard_local"):
            jax.jit(lambda p, s, b: step(p, s, b)[0])(cut, state, rows()[0])


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis_name", ["dcn", "ici"])
def test_the_devices_of_a_worker_share_its_rows(kind: AxisType, axis_name: str) -> None:
    sizes = {"dcn": 2, "ici": 4}
    tx = optax.chain(jaxcomm.mean(axis_name), optax.sgd(0.1))
    seen: list[int] = []

    def watched(params: Any, batch: jax.Array) -> jax.Array:
        seen.append(len(batch))
        return loss_fn(params, batch)

    mesh = mesh_of(kind, *sizes.values(), names=tuple(sizes))
    on_mesh = jaxcomm.make_step(watched, tx, mesh, axis_name=axis_name)
    simulated = jaxcomm.simulate(watched, tx, sizes, axis_name=axis_name)
    expected = jax.tree.map(
        lambda x, g: x - 0.1 * g, start(), jax.grad(loss_fn)(start(), jnp.asarray(rows()[0]))
    )
    for step, workers in ((on_mesh, mesh), (simulated, sizes)):
        state = jaxcomm.init(tx, start(), workers, axis_name=axis_name)
        params, _, metrics = step(start(), state, rows()[0])
        chex.assert_trees_all_close(params, expected, rtol=1e-5)
        np.testing.assert_allclose(metrics["loss"], loss_fn(start(), rows()[0]), rtol=1e-5)
    assert set(seen) == {2}  # 16 rows on 8 devices


def test_the_rows_of_a_worker_go_to_its_own_devices() -> None:
    sizes = {"dcn": 2, "ici": 4}
    tx = optax.chain(optax.sgd(0.5), gossip.dpsgd(gossip.ring(2), axis_name="dcn"))
    batch = np.arange(8, dtype=np.float32)
    for workers in (mesh_of(AxisType.Auto, 2, 4, names=("dcn", "ici")), sizes):
        params = jaxcomm.replicate(jnp.float32(0), workers, axis_name="dcn")
        state = jaxcomm.init(tx, params, workers, axis_name="dcn")
        make: Any = jaxcomm.make_step if isinstance(workers, Mesh) else jaxcomm.simulate
        step = make(
            lambda w, x: jnp.mean((w - x) ** 2), tx, workers, axis_name="dcn", metrics="own"
        )
        params, state, metrics = step(params, state, batch)
        # Worker 0 has rows 0 to 3, of mean square 3.5; worker 1 has 4 to 7, of 31.5.
        np.testing.assert_allclose(metrics["loss"], [3.5, 31.5])


def test_weights_of_a_workers_devices() -> None:
    def gradients(loss_fn: Any, params: Any, batch: jax.Array) -> Any:
        x, count = batch[:, 0], jnp.sum(batch[:, 1])
        mean = lambda w: jnp.sum(batch[:, 1] * w * x) / count  # noqa: E731
        return *jaxcomm.local_value_and_grad(mean, axis_name="dcn")(params), count

    sizes = {"dcn": 2, "ici": 2}
    batch = np.array([[1, 1], [2, 3], [5, 0], [7, 2]], np.float32)  # [x, weight] of each device
    tx = optax.chain(jaxcomm.mean("dcn"), optax.sgd(1.0))
    expected = -float((batch[:, 0] * batch[:, 1]).sum() / batch[:, 1].sum())
    for workers in (mesh_of(AxisType.Auto, 2, 2, names=("dcn", "ici")), sizes):
        state = jaxcomm.init(tx, jnp.float32(0), workers, axis_name="dcn")
        make: Any = jaxcomm.make_step if isinstance(workers, Mesh) else jaxcomm.simulate
        step = make(loss_fn, tx, workers, axis_name="dcn", gradients=gradients)
        params, _, metrics = step(jnp.float32(0), state, batch)
        np.testing.assert_allclose(params, expected, rtol=1e-6)
        assert metrics["weight"] == 6
