"""Messages of trees: their bytes, and what a codec makes of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._contract import Codec, Coins, Context, PyTree
from jaxcomm._require import require_codec


def bytes_of(tree: PyTree) -> int:
    """The bytes of all leaves."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


class EventMessage(NamedTuple):
    """How a worker and the server send trees to each other.

    Attributes:
      init: `tree -> memory`, what the codec keeps for one worker.
      send: `(memory, key, tree) -> (received, memory)`.
      bytes: `tree -> int`, of one message.
    """

    init: Callable[[PyTree], Any]
    send: Callable[[Any, jax.Array, PyTree], tuple[PyTree, Any]]
    bytes: Callable[[PyTree], int]


def message(codec: Codec | None) -> EventMessage:
    """The messages of a codec, leaf by leaf; of `None`, the leaves themselves.

    A worker and the server are a group of one worker. So both halves of the codec's memory, its own
    and the shared one, belong to the pair.
    """
    if codec is None:
        return EventMessage(lambda tree: (), lambda memory, key, tree: (tree, memory), bytes_of)
    require_codec(codec)

    def init(tree: PyTree) -> PyTree:
        return [codec.init(x.astype(jnp.float32)) for x in jax.tree.leaves(tree)]

    def context_of(memory: Any, key: jax.Array, x: jax.Array) -> Context:
        return Context(Coins(*jax.random.split(key)), memory, shape=x.shape)

    def encoded(memory: Any, key: jax.Array, x: jax.Array) -> tuple[Context, PyTree, Any]:
        context = context_of(memory, key, x)
        context = context.replace(statistics=codec.measure(context, x))
        return context, *codec.encode(context, x)

    def send(memory: Any, key: jax.Array, tree: PyTree) -> tuple[PyTree, Any]:
        leaves, treedef = jax.tree.flatten(tree)
        received, memories = [], []
        for number, (own, leaf) in enumerate(zip(memory, leaves, strict=True)):
            at = jax.random.fold_in(key, jnp.uint32(number))
            context, payload, after = encoded(own, at, leaf.astype(jnp.float32))
            mean = codec.decode(context.received(), payload)
            update, after = codec.finalize(context.replace(memory=after), payload, mean)
            received.append(update.astype(leaf.dtype))
            memories.append(after)
        return jax.tree.unflatten(treedef, received), memories

    def size(tree: PyTree) -> int:
        def contents(x: jax.Array, key: jax.Array) -> PyTree:
            narrow = x.astype(jnp.float32)
            context, payload, _ = encoded(codec.init(narrow), key, narrow)
            kinds = codec.reduce_statistics
            unsent = jax.tree.map(lambda kind: kind == "equal", kinds)
            return payload, jax.tree.map(
                lambda skip, x: () if skip else x, unsent, context.statistics
            )

        key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
        return sum(bytes_of(jax.eval_shape(contents, x, key)) for x in jax.tree.leaves(tree))

    return EventMessage(init, send, size)
