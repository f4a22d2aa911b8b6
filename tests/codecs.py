"""One worker's codec by itself, without an aggregator."""

import functools
from typing import Any

import jax
import numpy as np

from jaxcomm import Codec, Coins


def jitted(codec: Codec) -> Codec:
    """The same codec, each part of which is one program and not one an operation."""
    return codec._replace(
        measure=jax.jit(codec.measure),
        encode=jax.jit(codec.encode, static_argnums=4),
        decode=jax.jit(codec.decode, static_argnums=(3, 4, 5)),
    )


def coins_of(seed: int) -> Coins:
    return Coins(*jax.random.split(jax.random.key(seed)))


def _once(codec: Codec, memory: Any, x: jax.Array, coins: Coins) -> tuple[jax.Array, Any]:
    own = codec.measure(coins, memory, x)
    payload, memory = codec.encode(coins, memory, x, own, 1)
    return codec.decode(coins.public, payload, own, 1, 1, x.shape), memory


@functools.cache
def _one_step(codec: Codec) -> Any:
    return jax.jit(functools.partial(_once, codec))


@functools.cache
def _steps(codec: Codec) -> Any:
    def one(memory: Any, step: tuple[jax.Array, jax.Array]) -> Any:
        x, key = step
        decoded, memory = _once(codec, memory, x, Coins(*jax.random.split(key)))
        return memory, (decoded, memory.own.kept)

    return jax.jit(lambda memory, steps: jax.lax.scan(one, memory, steps))


def send(codec: Codec, memory: Any, x: jax.Array, seed: int = 0) -> tuple[np.ndarray, Any]:
    """What others decode of one worker's payload, float64, and what the worker remembers."""
    decoded, memory = _one_step(codec)(memory, x, coins_of(seed))
    return np.asarray(decoded, np.float64), memory


def run(codec: Codec, given: jax.Array) -> tuple[np.ndarray, np.ndarray, Any]:
    """Of `[steps, *shape]`: what is sent and what is kept in each step, and the last memory."""
    keys = jax.random.split(jax.random.key(7), len(given))
    memory, (sent, kept) = _steps(codec)(codec.init(given[0]), (given, keys))
    return np.asarray(sent, np.float64), np.asarray(kept, np.float64), memory
