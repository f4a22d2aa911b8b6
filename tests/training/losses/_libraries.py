"""Losses of flax, linen and nnx, and of optax."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import optax

from tests.training.losses._table import (
    CLASSES,
    ROWS,
    WIDTH,
    Loss,
    draw,
    labels,
    listed,
    sequences,
    third_party,
)


def square_error(apply: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The loss of outputs [rows, time, width] whose last step sums to the target."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        return jnp.mean((jnp.sum(apply(params, x)[:, -1], axis=-1) - y) ** 2)

    return third_party(loss)


def of_linen(module: nn.Module) -> Loss:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        params = module.init(jax.random.key(0), sequences()[0])
    return Loss(square_error(module.apply), params, sequences())


@listed()
def linen_lstm() -> Loss:
    return of_linen(nn.RNN(nn.LSTMCell(4)))


@listed()
def linen_convolution() -> Loss:
    return of_linen(nn.Sequential([nn.Conv(4, (3,)), nn.gelu, nn.LayerNorm(), nn.Dense(2)]))


@listed(model_state=True)
def linen_batch_norm() -> Loss:
    model = nn.Sequential(
        [nn.Dense(4), nn.BatchNorm(False, momentum=0.9, epsilon=0.1), nn.Dense(1)]
    )
    variables = model.init(jax.random.key(0), draw(2, WIDTH))

    def loss(params: Any, statistics: Any, batch: Any) -> Any:
        x, y = batch
        variables = {"params": params, "batch_stats": statistics}
        out, new = model.apply(variables, x, mutable=["batch_stats"])
        return jnp.mean((out[:, 0] - y) ** 2), new["batch_stats"]

    batch = draw(ROWS, WIDTH), draw(ROWS, seed=2)
    return Loss(third_party(loss), variables["params"], batch, variables["batch_stats"])


@listed()
def nnx_rnn() -> Loss:
    model = nnx.RNN(nnx.GRUCell(WIDTH, 4, rngs=nnx.Rngs(0)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, params, jax.tree.map(jnp.copy, rest))(x)

    return Loss(square_error(apply), params, sequences())


@listed()
def ctc() -> Loss:
    targets = labels(ROWS, 2, classes=CLASSES - 1) + 1

    def loss(params: Any, batch: Any) -> jax.Array:
        x, targets = batch
        logits, none = x @ params, jnp.zeros(x.shape[:2])
        return jnp.mean(optax.ctc_loss(logits, none, targets, jnp.zeros(targets.shape)))

    return Loss(third_party(loss), draw(WIDTH, CLASSES), (sequences()[0], targets))
