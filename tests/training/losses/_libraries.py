"""Losses of linen and nnx."""

from typing import Any

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp

from tests.training.losses._table import (
    ROWS,
    WIDTH,
    Loss,
    draw,
    listed,
    sequences,
    third_party,
)


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

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        out = nnx.merge(graph, params, jax.tree.map(jnp.copy, rest))(x)
        return jnp.mean((jnp.sum(out[:, -1], axis=-1) - y) ** 2)

    return Loss(third_party(loss), params, sequences())
