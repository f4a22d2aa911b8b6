"""Runs a codec without an aggregator: workers are arrays [workers, ...] on one device.

As in aggregators, workers share statistics if their payloads are combined.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._contract import Codec, Coins, Context, Memory, PyTree

_REDUCTIONS: dict[str, Callable[..., jax.Array]] = {
    "sum": functools.partial(jnp.sum, axis=0),
    "max": functools.partial(jnp.max, axis=0),
    "or": lambda words: jax.lax.reduce(words, words.dtype.type(0), jax.lax.bitwise_or, (0,)),
    "equal": lambda values: values[0],
}


class SentPayload(NamedTuple):
    """The results of one step of all workers.

    Attributes:
      contexts: The contexts of `encode`; leaves are [workers, ...].
      payloads: [workers, ...].
      after: The memories after `encode`, [workers, ...].
      decoded: Each payload as others decode it, [workers, *shape].
    """

    contexts: Context
    payloads: PyTree
    after: Memory
    decoded: jax.Array


def context_of(
    codec: Codec, x: jax.Array, coins: Coins, memory: Memory | None = None, workers: int = 1
) -> Context:
    """Returns the context of one worker with its own statistics, for `encode` and receivers."""
    memory = codec.init(x) if memory is None else memory
    context = Context(coins, memory, (), workers, 1, x.shape)
    return context.replace(statistics=codec.measure(context, x))


def reduce_statistics(kinds: PyTree, measured: PyTree) -> PyTree:
    """Reduces statistics [workers, ...] over workers."""
    return jax.tree.map(lambda kind, values: _REDUCTIONS[kind](values), kinds, measured)


def send(codec: Codec, x: jax.Array, memories: Memory, key: jax.Array) -> SentPayload:
    """Runs one step of all workers on updates [workers, *shape]."""
    workers, *shape = x.shape
    public, private = jax.random.split(key)
    privates = jax.random.split(private, workers)
    together = workers if codec.combine is not None else 1

    def context_with(private: jax.Array, memory: Memory, statistics: PyTree = ()) -> Context:
        return Context(Coins(public, private), memory, statistics, together, 1, tuple(shape))

    def measure(private: jax.Array, memory: Memory, x: jax.Array) -> PyTree:
        return codec.measure(context_with(private, memory), x)

    measured = jax.vmap(measure)(privates, memories, x)
    separate = codec.combine is None  # Then each payload travels with its own statistics.
    statistics = measured if separate else reduce_statistics(codec.reduce_statistics, measured)

    def encode(private: jax.Array, memory: Memory, x: jax.Array, statistics: PyTree) -> SentPayload:
        context = context_with(private, memory, statistics)
        payload, after = codec.encode(context, x)
        return SentPayload(context, payload, after, codec.decode(context.received(), payload))

    axes = (0, 0, 0, 0 if separate else None)
    return jax.vmap(encode, in_axes=axes)(privates, memories, x, statistics)


@functools.cache
def _draws(codec: Codec) -> Any:
    def once(x: jax.Array, key: jax.Array) -> SentPayload:
        return send(codec, x, jax.vmap(codec.init)(x), key)

    return jax.jit(jax.vmap(once, in_axes=(None, 0)))


@functools.cache
def _decoded(codec: Codec) -> Any:
    def once(x: jax.Array, key: jax.Array) -> jax.Array:
        return send(codec, x, jax.vmap(codec.init)(x), key).decoded

    return jax.jit(jax.vmap(once, in_axes=(None, 0)))


def keys(draws: int, seed: int) -> jax.Array:
    """Returns one key per step."""
    return jax.random.split(jax.random.key(seed, impl="threefry2x32"), draws)


def sent(codec: Codec, x: np.ndarray, draws: int, seed: int) -> SentPayload:
    """Repeats the first step on updates [workers, *shape]; leaves are [draws, workers, ...]."""
    result: SentPayload = _draws(codec)(jnp.asarray(x, jnp.float32), keys(draws, seed))
    return result


def decoded(codec: Codec, x: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Returns the decoded payloads of first steps, [draws, workers, *shape] in float64."""
    return np.asarray(_decoded(codec)(jnp.asarray(x, jnp.float32), keys(draws, seed)), np.float64)
