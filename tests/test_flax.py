"""Train states of other libraries: flax TrainState, nnx.Optimizer, and BatchNorm by hand."""

from typing import Any

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import PartitionSpec

import jaxcomm
from tests.workers import mesh_of

MESH = mesh_of(4)
X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def test_train_state() -> None:
    model = nn.Dense(1)
    tx = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.1))
    variables = model.init(jax.random.key(0), X)
    state = TrainState(
        step=jnp.int32(0),
        apply_fn=model.apply,
        params=variables["params"],
        tx=tx,
        opt_state=jaxcomm.init(tx, variables["params"], MESH),
    )
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


def test_nnx_optimizer() -> None:
    model = nnx.Linear(6, 1, rngs=nnx.Rngs(0))
    tx = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.1))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
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


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(8)(x))
        return nn.Dense(1)(nn.relu(x))


def test_batch_norm_by_hand() -> None:
    model = Normalized()
    variables = model.init(jax.random.key(0), X, train=True)
    params, statistics = variables["params"], variables["batch_stats"]
    tx = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.05))
    opt_state = jaxcomm.init(tx, params, MESH)

    def train_step(params: Any, statistics: Any, opt_state: Any, x: Any, y: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            prediction, updated = model.apply(
                {"params": params, "batch_stats": statistics}, x, train=True, mutable="batch_stats"
            )
            return jnp.mean((prediction - y) ** 2), updated["batch_stats"]

        (loss, statistics), gradients = jaxcomm.local_value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        # Running statistics are small: their exact mean keeps replicas equal.
        statistics, loss = lax.pmean((statistics, loss), "data")
        return optax.apply_updates(params, updates), statistics, opt_state, loss

    specs = jaxcomm.state_specs(opt_state)
    replicated, split = PartitionSpec(), PartitionSpec("data")
    step = jax.jit(
        jax.shard_map(
            train_step,
            mesh=MESH,
            in_specs=(replicated, replicated, specs, split, split),
            out_specs=(replicated, replicated, specs, replicated),
        )
    )
    losses = []
    for _ in range(60):
        params, statistics, opt_state, loss = step(params, statistics, opt_state, X, Y)
        losses.append(float(loss))
    assert losses[-1] < 0.2 * losses[0]
    hidden = X @ np.asarray(params["Dense_0"]["kernel"]) + np.asarray(params["Dense_0"]["bias"])
    running = np.asarray(statistics["BatchNorm_0"]["mean"])
    np.testing.assert_allclose(running, hidden.mean(axis=0), atol=0.3)
