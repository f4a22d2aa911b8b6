"""A model with stacked layers, a first and a last leaf, and steps of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxcomm
from jaxcomm.scheduling import aggregate_in_backward

LAYERS, SIDE, ROWS = 3, 6, 16
STACKED = {"layers": True, "first": False, "last": False}


def params(dtype: Any = jnp.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 3, dtype)  # noqa: E731
    return {
        "first": draw(SIDE, SIDE),
        "layers": {"w": draw(LAYERS, SIDE, SIDE), "b": draw(LAYERS, SIDE)},
        "last": draw(SIDE),
    }


def batch() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, SIDE)), jnp.float32)


def layer(h: jax.Array, weights: Any) -> jax.Array:
    return jnp.tanh(h @ weights["w"].astype(jnp.float32) + weights["b"].astype(jnp.float32)[None])


def body(h: jax.Array, weights: Any) -> tuple[jax.Array, None]:
    return layer(h, aggregate_in_backward(weights)), None


def loss(p: Any, x: jax.Array, body: Any = body, **options: Any) -> jax.Array:
    h, _ = lax.scan(body, x @ p["first"].astype(jnp.float32), p["layers"], **options)
    return jnp.mean((h @ p["last"].astype(jnp.float32)) ** 2)


def at_end(loss_fn: Any, p: Any, *args: Any) -> Any:
    """Passed as `gradients=`: the whole backward pass runs first."""
    return jaxcomm.local_value_and_grad(loss_fn)(p, *args)


def build(workers: Any, loss_fn: Any, tx: Any, **options: Any) -> Any:
    make = jaxcomm.simulate if isinstance(workers, int) else jaxcomm.make_step
    return make(loss_fn, tx, workers, donate=False, **options)


def train(
    workers: Any, tx: Any, loss_fn: Any = loss, p: Any = None, steps: int = 3, **options: Any
) -> tuple[Any, Any, Any]:
    chain = optax.chain(tx, optax.sgd(0.1, momentum=0.9))
    p = params() if p is None else p
    state, step, metrics = jaxcomm.init(chain, p, workers), None, None
    step = build(workers, loss_fn, chain, **options)
    for _ in range(steps):
        p, state, metrics = step(p, state, batch())
    return p, state, metrics


def plain(tree: Any) -> Any:
    """Keys as words, for comparisons."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)
