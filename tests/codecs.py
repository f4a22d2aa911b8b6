"""Runs one worker's codec without an aggregator."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import Codec, Context, Keys
from jaxcomm.testing import _codec


def keys_of(seed: int) -> Keys:
    return Keys(*jax.random.split(jax.random.key(seed)))


def context_of(
    codec: Codec, x: jax.Array, keys: Keys | int = 0, memory: Any = None, workers: int = 1
) -> Context:
    """With local statistics: the context for `encode`, and after `received` for `decode`."""
    drawn = keys_of(keys) if isinstance(keys, int) else keys
    return _codec.context_of(codec, x, drawn, memory, workers)


def _once(codec: Codec, memory: Any, x: jax.Array, keys: Keys) -> tuple[jax.Array, Any]:
    context = context_of(codec, x, keys, memory)
    payload, memory = codec.encode(context, x)
    return codec.decode(context.received(), payload), memory


@functools.cache
def _one_step(codec: Codec) -> Any:
    return jax.jit(functools.partial(_once, codec))


@functools.cache
def _steps(codec: Codec) -> Any:
    def one(memory: Any, step: tuple[jax.Array, jax.Array]) -> Any:
        x, key = step
        decoded, memory = _once(codec, memory, x, Keys(*jax.random.split(key)))
        return memory.kept, (decoded, getattr(memory.own, "kept", ()), memory.report)

    return jax.jit(lambda memory, steps: jax.lax.scan(one, memory, steps))


def send(codec: Codec, memory: Any, x: Any, seed: int = 0) -> tuple[np.ndarray, Any]:
    """One worker's decoded payload, float64, and the worker's new memory."""
    decoded, memory = _one_step(codec)(memory, jnp.asarray(x, jnp.float32), keys_of(seed))
    return np.asarray(decoded, np.float64), memory


def sent(codec: Codec, x: Any, seed: int = 0) -> np.ndarray:
    """One worker's decoded payload of the first step, float64."""
    x = jnp.asarray(x, jnp.float32)
    return send(codec, codec.init(x), x, seed)[0]


def draws(codec: Codec, x: Any, count: int) -> np.ndarray:
    """The decoded payloads of as many first steps of one worker, [count, *shape] in float64."""
    return _codec.decoded(codec, np.asarray(x)[None], count, seed=3)[:, 0]


def payload_of(codec: Codec, x: Any, **options: Any) -> Any:
    """The shapes of a payload; `x` may be a shape itself."""
    x = jax.ShapeDtypeStruct(x, jnp.float32) if isinstance(x, tuple) else x
    encode = lambda x: codec.encode(context_of(codec, x, **options), x)[0]  # noqa: E731
    return jax.eval_shape(encode, x)


def run(codec: Codec, given: Any) -> tuple[np.ndarray, Any, Any]:
    """Encodes `[steps, *shape]`: the sent and the kept array of each step, and the last memory."""
    given = jnp.asarray(given, jnp.float32)
    keys = jax.random.split(jax.random.key(7), len(given))
    memory, (decoded, kept, reports) = _steps(codec)(codec.init(given[0]), (given, keys))
    memory = memory._replace(report=jax.tree.map(lambda x: x[-1], reports))
    kept = jax.tree.map(lambda x: np.asarray(x, np.float64), kept)
    return np.asarray(decoded, np.float64), kept, memory
