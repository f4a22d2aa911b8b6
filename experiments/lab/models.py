"""The losses of the two models in JAX, over arrays by name (see `inputs`)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from experiments.lab.inputs import BLOCKS, HEADS, LAYERS, WIDTH

Params = Mapping[str, jax.Array]


def mlp_loss(params: Params, batch: jax.Array) -> jax.Array:
    """float32[rows, 1024] -> the mean squared error of the network against its input."""
    x = batch
    for layer in range(LAYERS):
        x = jnp.tanh(x @ params[f"weight_{layer}"] + params[f"bias_{layer}"][None])
    return jnp.mean((x - batch) ** 2)


def transformer_loss(params: Params, batch: jax.Array) -> jax.Array:
    """int32[rows, length + 1] -> the mean cross-entropy of each next byte, in nats."""
    log_probabilities = jax.nn.log_softmax(transformer_logits(params, batch[:, :-1]))
    labels = batch[:, 1:].reshape(-1, 1)
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels, axis=1))


def transformer_logits(params: Params, inputs: jax.Array) -> jax.Array:
    """int32[rows, length] -> float32[rows * length, 256]."""
    rows, length = inputs.shape
    x = params["embedding"][inputs] + params["positions"][None, :length]
    x = x.reshape(rows * length, WIDTH)
    for block in (f"block_{number}" for number in range(BLOCKS)):
        qkv = _dense(params, f"{block}_qkv", _norm(params, f"{block}_attention_norm", x))
        qkv = qkv.reshape(rows, -1, 3, HEADS, WIDTH // HEADS)
        parts = (qkv[:, :, number] for number in range(3))
        mixed = jax.nn.dot_product_attention(*parts, is_causal=True)
        x = x + _dense(params, f"{block}_mix", mixed.reshape(x.shape))
        hidden = _dense(params, f"{block}_up", _norm(params, f"{block}_mlp_norm", x))
        down = jax.nn.gelu(hidden, approximate=True) @ params[f"{block}_down"]
        x = x + down + params[f"{block}_down_bias"][None]
    return _norm(params, "final_norm", x) @ params["head"]


def _dense(params: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ params[name] + params[f"{name}_bias"][None]


def _norm(params: Params, name: str, x: jax.Array) -> jax.Array:
    centered = x - jnp.mean(x, axis=1, keepdims=True)
    variance = jnp.mean(centered**2, axis=1, keepdims=True)
    scaled = centered * lax.rsqrt(variance + 1e-5)
    return scaled * params[f"{name}_scale"][None] + params[f"{name}_shift"][None]


LOSSES = {"mlp": mlp_loss, "transformer": transformer_loss}
