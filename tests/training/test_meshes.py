"""A step wherever it stands: any type of axes, 1 and 8 devices, called, jitted and scanned."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxcomm
from jaxcomm import gossip
from tests.slow import slow
from tests.training.places import KINDS, SGD, at, begun, mesh_of, normal

START = {"w": jnp.linspace(-1, 1, 6).reshape(3, 2), "b": jnp.float32(0.5)}
ROWS = normal(0, 3, 16, 3)
PLACES = pytest.mark.parametrize("where", ["auto", "explicit", "simulated"])


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["w"] - params["b"]) ** 2)


@pytest.mark.parametrize("where", ["auto", "simulated", slow("explicit"), slow("auto 1")])
def test_one_compilation(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """From parameters of weak types, and rows of NumPy or of JAX."""
    params: Any = {"w": jnp.full((3, 2), 1.0), "b": jnp.asarray(2.0)}
    assert params["b"].weak_type
    tx = optax.chain(jaxcomm.mean(), optax.trace(0.9), optax.sgd(0.1))
    step, state = begun(loss_fn, tx, at(where), params, donate=True)
    with jax.log_compiles():
        for batch in (ROWS[0], ROWS[1], jnp.asarray(ROWS[2])):
            params, state, _ = step(params, state, batch)
    names = ("on_mesh", "simulated_workers")
    starts = tuple(f"Finished XLA compilation of jit({name})" for name in names)
    assert len([r for r in caplog.messages if r.startswith(starts)]) == 1


@PLACES
def test_arrays_of_any_placement(where: str) -> None:
    """One that is two parameters and is donated; parameters, rows and a weight of one device."""
    shared = jax.device_put(jnp.ones((3, 2)), jax.devices()[5])
    loss = lambda p, batch: jnp.mean((batch @ (p["w"] + p["v"])) ** 2)  # noqa: E731
    params = {"w": shared, "v": shared}
    step, state = begun(loss, SGD, at(where), params, donate=True)
    if where != "simulated":
        batch, weight = jax.device_put((jnp.asarray(ROWS[0]), jnp.float32(1)), jax.devices()[3])
        params, state, _ = step(params, state, batch, weight=weight)
    params, _, _ = step(params, state, ROWS[1])
    np.testing.assert_array_equal(params["w"], params["v"])


@pytest.mark.parametrize("kind", KINDS.values())
def test_sharded_arrays_are_not_gathered_silently(kind: AxisType) -> None:
    mesh = mesh_of(kind, 2, 4, names=("data", "model"))
    tx = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.1))
    params = START | {"w": jnp.ones((3, 4))}
    columns = NamedSharding(mesh, PartitionSpec(None, "model"))
    cut = params | {"w": jax.device_put(params["w"], columns)}
    step, state = begun(loss_fn, tx, mesh, params)
    runs = [lambda: jaxcomm.init(tx, cut, mesh), lambda: step(cut, state, ROWS[0])]
    if kind == AxisType.Explicit:  # Auto axes show in no type.
        both = jaxcomm.make_step(loss_fn, tx, mesh, axis_name=("data", "model"))
        runs.append(lambda: jax.jit(lambda p, s, b: both(p, s, b)[0])(cut, state, ROWS[0]))
    for run in runs:
        with pytest.raises(ValueError, match=r"params\['w'\] is sharded over devices.*shard_local"):
            run()
    if kind == AxisType.Explicit:
        of_state = lambda p, s, b: (loss_fn(p, b), s)  # noqa: E731
        step, state = begun(of_state, SGD, mesh, params, has_model_state=True)
        for each in (step, jax.jit(step)):
            with pytest.raises(ValueError, match="model_state is sharded over devices"):
                each(params, cut["w"], state, ROWS[0])


def placed(*sizes: int) -> list[Any]:
    return [
        mesh_of(AxisType.Auto, *sizes, names=("dcn", "ici")),
        dict(zip(("dcn", "ici"), sizes, strict=True)),
    ]


@pytest.mark.parametrize("workers", placed(2, 4), ids=["auto", "simulated"])
def test_the_rows_of_a_worker_go_to_its_own_devices(workers: Any) -> None:
    tx = optax.chain(optax.sgd(0.5), gossip.dpsgd(gossip.ring(2), axis_name="dcn"))
    params = jaxcomm.replicate(jnp.float32(0), workers, axis_name="dcn")
    loss = lambda w, x: jnp.mean((w - x) ** 2)  # noqa: E731
    step, state = begun(loss, tx, workers, params, axis_name="dcn", metrics="own")
    params, state, metrics = step(params, state, np.arange(8, dtype=np.float32))
    # Worker 0 has rows 0 to 3, of mean square 3.5; worker 1 has 4 to 7, of 31.5.
    np.testing.assert_allclose(metrics["loss"], [3.5, 31.5])


@pytest.mark.parametrize("workers", placed(2, 2), ids=["auto", "simulated"])
def test_weights_of_a_workers_devices(workers: Any) -> None:
    def gradients(loss_fn: Any, params: Any, batch: jax.Array) -> Any:
        x, count = batch[:, 0], jnp.sum(batch[:, 1])
        mean = lambda w: jnp.sum(batch[:, 1] * w * x) / count  # noqa: E731
        return *jaxcomm.local_value_and_grad(mean, axis_name="dcn")(params), count

    batch = np.array([[1, 1], [2, 3], [5, 0], [7, 2]], np.float32)  # [x, weight] of each device
    tx = optax.chain(jaxcomm.mean("dcn"), optax.sgd(1.0))
    start = jnp.float32(0)
    step, state = begun(loss_fn, tx, workers, start, axis_name="dcn", gradients=gradients)
    params, _, metrics = step(start, state, batch)
    np.testing.assert_allclose(params, -np.average(batch[:, 0], weights=batch[:, 1]), rtol=1e-6)
    assert metrics["weight"] == 6
