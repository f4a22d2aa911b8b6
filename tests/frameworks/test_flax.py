"""Models of flax in steps of their own: linen with a TrainState, and nnx.Optimizer."""

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
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from tests.slow import slow
from tests.workers import mesh_of

MESH = mesh_of(4)
X = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def with_feedback(rate: float) -> Any:
    codec = error_feedback(top_k(ratio=0.5))
    return optax.chain(jaxcomm.all_gather_mean(codec), optax.sgd(rate))


METHODS = {
    "global_qsgd": lambda rate: optax.chain(jaxcomm.global_qsgd(), optax.sgd(rate)),
    "feedback": with_feedback,
}
METHOD = pytest.mark.parametrize("method", ["feedback", slow("global_qsgd")])


def errors_of(prediction: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((prediction - y) ** 2)


def trained(
    loss: Any, tx: Any, params: Any, state: Any = None, steps: int = 60, keys: bool = False
) -> Any:
    """The losses of steps on the mesh, the parameters, and the model state if there is one."""
    states, losses = [] if state is None else [state], []
    step = jaxcomm.make_step(loss, tx, MESH, has_model_state=bool(states))
    carry: Any = (params, *states, jaxcomm.init(tx, params, MESH))
    for number in range(steps):
        key = {"key": jax.random.key(number)} if keys else {}
        *carry, metrics = step(*carry, (X, Y), **key)
        losses.append(float(metrics["loss"]))
    return losses, *carry[:-1]


def placed(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transformation for frameworks that call `tx.init` themselves."""
    return tx._replace(init=lambda params: jaxcomm.init(tx, params, MESH))


def by_hand(step: Any, state: Any, steps: int = 20) -> list[float]:
    """The losses of `(state, x, y) -> (state, loss)`, a step by a framework's own optimizer."""
    specs = jaxcomm.state_specs(state)
    in_specs, out_specs = (specs, P("data"), P("data")), (specs, P())
    run = jax.jit(jax.shard_map(step, mesh=MESH, in_specs=in_specs, out_specs=out_specs))
    losses = []
    for _ in range(steps):
        state, loss = run(state, X, Y)
        losses.append(float(loss))
    return losses


def dense(method: str) -> TrainState:
    model = nn.Dense(1)
    params = model.init(jax.random.key(0), X)["params"]
    tx = placed(METHODS[method](0.1))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx).replace(step=jnp.int32(0))


@METHOD
def test_train_state(method: str) -> None:
    def train_step(state: TrainState, x: jax.Array, y: jax.Array) -> Any:
        loss_fn = lambda params: errors_of(state.apply_fn({"params": params}, x), y)  # noqa: E731
        loss, gradients = jaxcomm.local_value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=gradients), lax.pmean(loss, "data")

    losses = by_hand(train_step, dense(method))
    assert losses[-1] < 0.1 * losses[0]


def test_frameworks_that_call_init_get_an_explanation() -> None:
    with pytest.raises(ValueError, match=r"is not bound here.*`tx._replace\(init=lambda"):
        TrainState.create(apply_fn=None, params=dense("feedback").params, tx=with_feedback(0.1))


def test_a_whole_nnx_module_is_refused() -> None:
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"count.* is uint32.*Mask it with"):
        jaxcomm.init(METHODS["global_qsgd"](0.1), model, MESH)


@METHOD
def test_nnx_optimizer(method: str) -> None:
    model = nnx.Linear(6, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, placed(METHODS[method](0.1)), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def train_step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, state)
        model_graph, params = nnx.split(model)
        loss_fn = lambda params: errors_of(nnx.merge(model_graph, params)(x), y)  # noqa: E731
        loss, gradients = jaxcomm.local_value_and_grad(loss_fn)(params)
        optimizer.update(model, gradients)
        return nnx.split((model, optimizer))[1], lax.pmean(loss, "data")

    losses = by_hand(train_step, state)
    assert losses[-1] < 0.1 * losses[0]
