"""The losses of the two models in JAX, over arrays by name (see `inputs`)."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

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
    for block in range(BLOCKS):
        own = {
            name.removeprefix(f"block_{block}_"): value
            for name, value in params.items()
            if name.startswith(f"block_{block}_")
        }
        x = x + _attention(own, _norm(own, "attention_norm", x), rows)
        hidden = _norm(own, "mlp_norm", x) @ own["up"] + own["up_bias"][None]
        x = x + jax.nn.gelu(hidden, approximate=True) @ own["down"] + own["down_bias"][None]
    return _norm(params, "final_norm", x) @ params["head"]


def _attention(params: Params, x: jax.Array, rows: int) -> jax.Array:
    """Causal attention: [rows * length, width] -> the same shape."""
    qkv = x @ params["qkv"] + params["qkv_bias"][None]
    qkv = qkv.reshape(rows, -1, 3, HEADS, WIDTH // HEADS)
    mixed = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
    return mixed.reshape(x.shape) @ params["mix"] + params["mix_bias"][None]


def _norm(params: Params, name: str, x: jax.Array) -> jax.Array:
    centered = x - jnp.mean(x, axis=1, keepdims=True)
    variance = jnp.mean(centered**2, axis=1, keepdims=True)
    scaled = centered * jax.lax.rsqrt(variance + 1e-5)
    return scaled * params[f"{name}_scale"][None] + params[f"{name}_shift"][None]


LOSSES: dict[str, Callable[[Params, jax.Array], jax.Array]] = {
    "mlp": mlp_loss,
    "transformer": transformer_loss,
}
