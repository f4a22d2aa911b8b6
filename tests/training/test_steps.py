"""Training steps: right numbers, what is donated, and programs that do not wait."""

import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxcomm
from tests.training.places import SGD, at, begun, normal
from tests.workers import mesh_of

N = 4
MESH = mesh_of(N)
DATA = normal(0, 16, 5), normal(1, 16)
START = {"w": jnp.linspace(-1, 1, 5), "b": jnp.float32(0.5)}
PLACES = pytest.mark.parametrize("where", ["auto 4", "simulated 4"])


def loss_fn(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


@PLACES
def test_the_mean_trains_like_one_device(where: str) -> None:
    rmsprop = optax.rmsprop(0.1)
    step, state = begun(loss_fn, optax.chain(jaxcomm.mean(), rmsprop), at(where), START)
    params, alone, alone_state = START, START, rmsprop.init(START)
    for _ in range(10):
        params, state, metrics = step(params, state, DATA)
        loss, gradient = jax.value_and_grad(loss_fn)(alone, DATA)
        updates, alone_state = rmsprop.update(gradient, alone_state)
        alone = optax.apply_updates(alone, updates)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
    chex.assert_trees_all_close(params, alone, rtol=1e-4, atol=1e-5)


@PLACES
def test_python_numbers_are_parameters(where: str) -> None:
    params = {"w": 2.0, "b": np.float64(0.5)}
    tx = optax.chain(jaxcomm.global_qsgd(bits=16), optax.sgd(0.1, momentum=0.9))
    step, state = begun(lambda p, x: jnp.mean(p["w"] * x + p["b"]), tx, at(where), params)
    new, _, _ = step(params, state, np.ones(N, np.float32))
    np.testing.assert_allclose([new["w"], new["b"]], [1.9, 0.4], rtol=1e-4)


@PLACES
def test_metrics_are_averaged(where: str) -> None:
    """Bools are shares; `test_any_loss` has a loss with the key of each worker."""
    loss = lambda p, b: (loss_fn(p, b), {"first": b[1][0], "share": jnp.bool_(True)})  # noqa: E731
    step, state = begun(loss, SGD, at(where), START, has_aux=True)
    _, _, metrics = step(START, state, DATA)
    assert set(metrics) == {"loss", "first", "share"}
    np.testing.assert_allclose(metrics["first"], DATA[1][::4].mean(), rtol=1e-6)
    assert metrics["share"] == 1 and metrics["share"].dtype == jnp.float32


def test_donated_state_is_deleted_and_other_state_is_kept() -> None:
    tx = optax.chain(jaxcomm.mean(), optax.rmsprop(0.1))
    for donate in (True, False):
        params = jax.tree.map(jnp.copy, START)
        params = jax.device_put(params, NamedSharding(MESH, PartitionSpec()))
        step, state = begun(loss_fn, tx, MESH, START, donate=donate)
        step(params, state, DATA)
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


@pytest.mark.parametrize("program", [ENDLESS, SHARED], ids=["never_waits", "donated"])
def test_a_step_is_a_separate_program(program: str) -> None:
    """A loop that never waits does not deadlock; what is donated is in no other argument."""
    environment = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.stdout.startswith("done"), finished.stderr[-2000:]
    assert "may be stuck" not in finished.stderr
