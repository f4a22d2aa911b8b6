"""Models of flax: linen with a TrainState, nnx with model state, nnx.Optimizer, BatchNorm."""

from typing import Any

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import PartitionSpec

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from tests.workers import mesh_of

N = 4
MESH = mesh_of(N)
X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def with_feedback(rate: float) -> Any:
    codec = error_feedback(top_k(ratio=0.5))
    return optax.chain(jaxcomm.all_gather_mean(codec), optax.sgd(rate))


METHODS = {
    "global_qsgd": lambda rate: optax.chain(jaxcomm.global_qsgd(), optax.sgd(rate)),
    "feedback": with_feedback,
}
METHOD = pytest.mark.parametrize("method", METHODS)


def placed(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transformation for frameworks that call `tx.init` themselves."""
    return tx._replace(init=lambda params: jaxcomm.init(tx, params, MESH))


@pytest.mark.slow
@METHOD
def test_train_state_with_make_step(method: str) -> None:
    model, tx = nn.Dense(1), METHODS[method](0.1)
    params = model.init(jax.random.key(0), X)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=placed(tx))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    step = jaxcomm.make_step(loss_fn, tx, MESH)
    losses = []
    for _ in range(20):
        params, opt_state, metrics = step(state.params, state.opt_state, (X, Y))
        state = state.replace(params=params, opt_state=opt_state, step=state.step + 1)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.1 * losses[0] and state.step == 20


@pytest.mark.quick(1)
@METHOD
def test_train_state_with_a_step_by_hand(method: str) -> None:
    model, tx = nn.Dense(1), METHODS[method](0.1)
    params = model.init(jax.random.key(0), X)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=placed(tx))
    state = state.replace(step=jnp.int32(0))
    specs = jaxcomm.state_specs(state)

    def train_step(state: TrainState, x: jax.Array, y: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

        loss, gradients = jaxcomm.local_value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=gradients), lax.pmean(loss, "data")

    step = jax.jit(
        jax.shard_map(
            train_step,
            mesh=MESH,
            in_specs=(specs, PartitionSpec("data"), PartitionSpec("data")),
            out_specs=(specs, PartitionSpec()),
        )
    )
    losses = []
    for _ in range(20):
        state, loss = step(state, X, Y)
        losses.append(float(loss))
    assert losses[-1] < 0.1 * losses[0]


def test_a_framework_that_calls_init_is_told_how() -> None:
    params = nn.Dense(1).init(jax.random.key(0), X)["params"]
    with pytest.raises(ValueError, match=r"is not bound here.*`tx._replace\(init=lambda"):
        TrainState.create(apply_fn=None, params=params, tx=with_feedback(0.1))


def test_a_whole_nnx_module_is_refused() -> None:
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"count.* is uint32.*Mask it with"):
        jaxcomm.init(METHODS["global_qsgd"](0.1), model, MESH)


@pytest.mark.quick(1)
@METHOD
def test_nnx_optimizer(method: str) -> None:
    model = nnx.Linear(6, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, placed(METHODS[method](0.1)), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))
    specs = jaxcomm.state_specs(state)

    def train_step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, state)
        model_graph, params = nnx.split(model)

        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean((nnx.merge(model_graph, params)(x) - y) ** 2)

        loss, gradients = jaxcomm.local_value_and_grad(loss_fn)(params)
        optimizer.update(model, gradients)
        return nnx.split((model, optimizer))[1], lax.pmean(loss, "data")

    step = jax.jit(
        jax.shard_map(
            train_step,
            mesh=MESH,
            in_specs=(specs, PartitionSpec("data"), PartitionSpec("data")),
            out_specs=(specs, PartitionSpec()),
        )
    )
    losses = []
    for _ in range(20):
        state, loss = step(state, X, Y)
        losses.append(float(loss))
    assert losses[-1] < 0.1 * losses[0]


class NormalizedNnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x))), rngs=rngs))


@pytest.mark.quick(1)
@METHOD
def test_nnx_with_make_step(method: str) -> None:
    graph, params, state = nnx.split(NormalizedNnx(nnx.Rngs(0)), nnx.Param, ...)
    tx = METHODS[method](0.03)

    def loss_fn(params: Any, state: Any, batch: Any, key: jax.Array) -> Any:
        model = nnx.merge(graph, params, state)
        prediction = model(batch[0], nnx.Rngs(dropout=key))  # Workers drop different units.
        return jnp.mean((prediction - batch[1]) ** 2), nnx.split(model, nnx.Param, ...)[2]

    step = jaxcomm.make_step(loss_fn, tx, MESH, has_model_state=True)
    opt_state = jaxcomm.init(tx, params, MESH)
    losses = []
    for number in range(60):
        params, state, opt_state, metrics = step(
            params, state, opt_state, (X, Y), key=jax.random.key(number)
        )
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]
    model = nnx.merge(graph, params, state)
    model.eval()
    assert float(jnp.mean((model(X) - Y) ** 2)) < 0.5 * losses[0]


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(8)(x))
        return nn.Dense(1)(nn.relu(x))


@pytest.mark.slow
def test_batch_norm() -> None:
    model = Normalized()
    variables = model.init(jax.random.key(0), X, train=True)
    params, statistics = variables["params"], variables["batch_stats"]
    tx = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.05))

    def loss_fn(params: Any, statistics: Any, batch: Any) -> Any:
        prediction, updated = model.apply(
            {"params": params, "batch_stats": statistics},
            batch[0],
            train=True,
            mutable="batch_stats",
        )
        return jnp.mean((prediction - batch[1]) ** 2), updated["batch_stats"]

    step = jaxcomm.make_step(loss_fn, tx, MESH, has_model_state=True)
    opt_state = jaxcomm.init(tx, params, MESH)
    losses = []
    for _ in range(60):
        params, statistics, opt_state, metrics = step(params, statistics, opt_state, (X, Y))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.2 * losses[0]
    hidden = X @ np.asarray(params["Dense_0"]["kernel"]) + np.asarray(params["Dense_0"]["bias"])
    running = np.asarray(statistics["BatchNorm_0"]["mean"])
    np.testing.assert_allclose(running, hidden.mean(axis=0), atol=0.3)


def test_boxed_parameters() -> None:
    """A loss with them raises an error of JAX about an axis that the mesh lacks."""
    x, mesh, tx = jnp.ones((4, 3)), mesh_of(2), optax.chain(jaxcomm.mean(), optax.sgd(0.1))
    kernel = nn.with_partitioning(nn.initializers.ones, (None, "model"))
    model = nn.Dense(2, kernel_init=kernel)
    params = model.init(jax.random.key(0), x)
    step = jaxcomm.make_step(lambda p, x: jnp.mean(model.apply(p, x) ** 2), tx, mesh)
    with pytest.raises(ValueError, match="model"):
        step(params, jaxcomm.init(tx, params, mesh), x)
    params = nn.meta.unbox(params)
    assert step(params, jaxcomm.init(tx, params, mesh), x)[2]["loss"] == 9
