"""Runs one worker's codec without an aggregator."""

import functools
from typing import Any

import jax
import numpy as np

from jaxcomm import Codec, Coins, Context
from jaxcomm.testing import _codec


def jitted(codec: Codec) -> Codec:
    """The same codec, compiled: each function is one program instead of one per operation."""
    return codec.replace(
        measure=jax.jit(codec.measure), encode=jax.jit(codec.encode), decode=jax.jit(codec.decode)
    )


def coins_of(seed: int) -> Coins:
    return Coins(*jax.random.split(jax.random.key(seed)))


def context_of(
    codec: Codec, x: jax.Array, coins: Coins | int = 0, memory: Any = None, workers: int = 1
) -> Context:
    """With local statistics: the context for `encode`, and after `received` for `decode`."""
    drawn = coins_of(coins) if isinstance(coins, int) else coins
    return _codec.context_of(codec, x, drawn, memory, workers)


def _once(codec: Codec, memory: Any, x: jax.Array, coins: Coins) -> tuple[jax.Array, Any]:
    context = context_of(codec, x, coins, memory)
    payload, memory = codec.encode(context, x)
    return codec.decode(context.received(), payload), memory


@functools.cache
def _one_step(codec: Codec) -> Any:
    return jax.jit(functools.partial(_once, codec))


@functools.cache
def _steps(codec: Codec) -> Any:
    def one(memory: Any, step: tuple[jax.Array, jax.Array]) -> Any:
        x, key = step
        decoded, memory = _once(codec, memory, x, Coins(*jax.random.split(key)))
        return memory.kept, (decoded, memory.own.kept, memory.report)

    return jax.jit(lambda memory, steps: jax.lax.scan(one, memory, steps))


def send(codec: Codec, memory: Any, x: jax.Array, seed: int = 0) -> tuple[np.ndarray, Any]:
    """One worker's decoded payload, float64, and the worker's new memory."""
    decoded, memory = _one_step(codec)(memory, x, coins_of(seed))
    return np.asarray(decoded, np.float64), memory


def run(codec: Codec, given: jax.Array) -> tuple[np.ndarray, np.ndarray, Any]:
    """Encodes `[steps, *shape]`: the sent and the kept array of each step, and the last memory."""
    keys = jax.random.split(jax.random.key(7), len(given))
    memory, (sent, kept, reports) = _steps(codec)(codec.init(given[0]), (given, keys))
    memory = memory._replace(report=jax.tree.map(lambda x: x[-1], reports))
    return np.asarray(sent, np.float64), np.asarray(kept, np.float64), memory
