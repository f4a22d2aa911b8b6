"""A codec by itself: workers as arrays [workers, ...] on one device.

They share statistics where their payloads are joined, as aggregators have it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._base import Codec, Coins, Context, Memory, PyTree

_OVER_WORKERS: dict[str, Callable[..., jax.Array]] = {
    "sum": functools.partial(jnp.sum, axis=0),
    "max": functools.partial(jnp.max, axis=0),
    "or": lambda words: jax.lax.reduce(words, words.dtype.type(0), jax.lax.bitwise_or, (0,)),
}


class Sent(NamedTuple):
    """What workers did in one step.

    Attributes:
      contexts: In which they encoded; leaves are [workers, ...].
      payloads: [workers, ...].
      after: The memories, [workers, ...].
      decoded: What others decode of each payload, [workers, *shape].
    """

    contexts: Context
    payloads: PyTree
    after: Memory
    decoded: jax.Array


def context_of(
    codec: Codec, x: jax.Array, coins: Coins, memory: Memory | None = None, workers: int = 1
) -> Context:
    """Of one worker, with statistics of its own: what `encode` needs, and receivers know."""
    kept = codec.init(x) if memory is None else memory
    context = Context(coins, kept, (), workers, 1, x.shape)
    return context.replace(statistics=codec.measure(context, x))


def over_workers(kinds: PyTree, measured: PyTree) -> PyTree:
    """What workers agree on, of statistics [workers, ...]."""
    return jax.tree.map(lambda kind, values: _OVER_WORKERS[kind](values), kinds, measured)


def send(codec: Codec, x: jax.Array, memories: Memory, key: jax.Array) -> Sent:
    """One step of workers, of updates [workers, *shape]."""
    workers, *shape = x.shape
    public, private = jax.random.split(key)
    privates = jax.random.split(private, workers)
    together = workers if codec.combine is not None else 1

    def knows(private: jax.Array, memory: Memory, statistics: PyTree = ()) -> Context:
        return Context(Coins(public, private), memory, statistics, together, 1, tuple(shape))

    def measure(private: jax.Array, memory: Memory, x: jax.Array) -> PyTree:
        return codec.measure(knows(private, memory), x)

    measured = jax.vmap(measure)(privates, memories, x)
    alone = codec.combine is None  # Then statistics travel with the payload.
    statistics = measured if alone else over_workers(codec.reduce_statistics, measured)

    def encode(private: jax.Array, memory: Memory, x: jax.Array, statistics: PyTree) -> Sent:
        context = knows(private, memory, statistics)
        payload, after = codec.encode(context, x)
        return Sent(context, payload, after, codec.decode(context.received(), payload))

    each = (0, 0, 0, 0 if alone else None)
    return jax.vmap(encode, in_axes=each)(privates, memories, x, statistics)


@functools.cache
def _draws(codec: Codec) -> Any:
    def once(x: jax.Array, key: jax.Array) -> Sent:
        return send(codec, x, jax.vmap(codec.init)(x), key)

    return jax.jit(jax.vmap(once, in_axes=(None, 0)))


@functools.cache
def _decoded(codec: Codec) -> Any:
    def once(x: jax.Array, key: jax.Array) -> jax.Array:
        return send(codec, x, jax.vmap(codec.init)(x), key).decoded

    return jax.jit(jax.vmap(once, in_axes=(None, 0)))


def keys(draws: int, seed: int) -> jax.Array:
    """Of so many steps."""
    return jax.random.split(jax.random.key(seed, impl="threefry2x32"), draws)


def sent(codec: Codec, x: np.ndarray, draws: int, seed: int) -> Sent:
    """First steps of updates [workers, *shape], each leaf [draws, workers, ...]."""
    result: Sent = _draws(codec)(jnp.asarray(x, jnp.float32), keys(draws, seed))
    return result


def decoded(codec: Codec, x: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """What others decode of first steps, [draws, workers, *shape] in float64."""
    return np.asarray(_decoded(codec)(jnp.asarray(x, jnp.float32), keys(draws, seed)), np.float64)
