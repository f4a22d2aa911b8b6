"""The messages of events: how trees travel between a worker and the owner, and their counts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._contract import Codec, Context, Keys, Memory, PyTree


class Sent(NamedTuple):
    """The messages of an event: what the worker sends, and what it receives in reply."""

    uploads: jax.Array  # int32[], messages
    upload_bytes: jax.Array  # int32[]
    downloads: jax.Array  # int32[], messages
    download_bytes: jax.Array  # int32[]


def sent(
    uploads: jax.Array | int = 0,
    upload_bytes: jax.Array | int = 0,
    downloads: jax.Array | int = 0,
    download_bytes: jax.Array | int = 0,
) -> Sent:
    """The messages of an event.

    Args:
      uploads: The number of messages that the worker sends.
      upload_bytes: Their bytes together.
      downloads: The number of messages that it receives.
      download_bytes: Their bytes together.

    Returns:
      The counts, a named tuple of int32[], with the names of the arguments.

    Example:
      >>> from jaxcomm.synchronization.events import sent
      >>> print(sent(uploads=1, upload_bytes=400).upload_bytes)
      400
    """
    counts = (uploads, upload_bytes, downloads, download_bytes)
    return Sent(*(jnp.asarray(count, jnp.int32) for count in counts))


def bytes_of(tree: PyTree) -> int:
    """The bytes of all leaves."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


class Messages(NamedTuple):
    """How a worker sends trees to the owner: it encodes them, and the owner decodes them.

    Attributes:
      init: `tree -> memory`, what the worker keeps between messages: of each leaf, a `Memory`.
      kept: `memory -> shared`, the part that the owner keeps too; it has no leaf for most codecs.
      encode: `(memory, key, tree) -> (message, memory)`.
      decode: `(shared, key, message, like) -> (tree, shared)`, with the shapes and dtypes of `like`
        and the key that encoded.
      bytes: `tree -> int`, of one message.
    """

    init: Callable[[PyTree], Any]
    kept: Callable[[Any], Any]
    encode: Callable[[Any, jax.Array, PyTree], tuple[PyTree, Any]]
    decode: Callable[[Any, jax.Array, PyTree, PyTree], tuple[PyTree, Any]]
    bytes: Callable[[PyTree], int]


class Coded(NamedTuple):
    """The message of one leaf."""

    payload: PyTree
    statistics: PyTree  # those that the owner cannot compute itself


_EXACT = Messages(
    init=lambda tree: (),
    kept=lambda memory: (),
    encode=lambda memory, key, tree: (tree, memory),
    decode=lambda shared, key, message, like: (message, shared),
    bytes=bytes_of,
)


def messages(codec: Codec | None) -> Messages:
    """The messages of a codec, leaf by leaf; of `None`, the leaves themselves.

    A worker and the owner are a group of one worker. So the shared half of the codec's memory
    belongs to the pair, and both keep it.
    """
    if codec is None:
        return _EXACT

    def context_of(memory: Memory, key: jax.Array, number: int, shape: tuple[int, ...]) -> Context:
        at = jax.random.fold_in(key, jnp.uint32(number))
        return Context(Keys(*jax.random.split(at)), memory, shape=shape)

    def is_known(of: Callable[..., Any], *trees: PyTree) -> PyTree:
        """`of(is known, statistic)` of each statistic; the owner can compute those that are."""
        kinds = codec.reduce_statistics
        return jax.tree.map(lambda kind, *x: of(kind == "equal", *x), kinds, *trees)

    def init(tree: PyTree) -> list[Memory]:
        return [codec.init(x.astype(jnp.float32)) for x in jax.tree.leaves(tree)]

    def kept(memory: list[Memory]) -> list[PyTree]:
        return [each.shared for each in memory]

    def finalized(context: Context, coded: Coded) -> tuple[jax.Array, Memory]:
        """`(update, memory)`, on both sides; the context has the memory after encoding."""
        mean = codec.decode(context.received(), coded.payload)
        update, after = codec.finalize(context, coded.payload, mean)
        return update, after.kept

    def encode(memory: list[Memory], key: jax.Array, tree: PyTree) -> tuple[list[Coded], Any]:
        coded, memories = [], []
        for number, (own, leaf) in enumerate(zip(memory, jax.tree.leaves(tree), strict=True)):
            context, x = context_of(own, key, number, leaf.shape), leaf.astype(jnp.float32)
            context = context.replace(statistics=codec.measure(context, x))
            payload, after = codec.encode(context, x)
            message = Coded(payload, context.statistics)
            memories.append(finalized(context.replace(memory=after), message)[1])
            unknown = is_known(lambda known, x: () if known else x, context.statistics)
            coded.append(message._replace(statistics=unknown))
        return coded, memories

    def decode(
        shared: list[PyTree], key: jax.Array, message: list[Coded], like: PyTree
    ) -> tuple[PyTree, list[PyTree]]:
        leaves, treedef = jax.tree.flatten(like)
        received, after = [], []
        for number, (coded, both, leaf) in enumerate(zip(message, shared, leaves, strict=True)):
            zeros = jnp.zeros(leaf.shape, jnp.float32)
            memory = codec.init(zeros)._replace(shared=both)
            context = context_of(memory, key, number, leaf.shape)
            known = codec.measure(context, zeros)
            statistics = is_known(
                lambda known, x, sent: x if known else sent, known, coded.statistics
            )
            update, memory = finalized(context.replace(statistics=statistics), coded)
            received.append(update.astype(leaf.dtype))
            after.append(memory.shared)
        return jax.tree.unflatten(treedef, received), after

    def size(tree: PyTree) -> int:
        key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
        return bytes_of(jax.eval_shape(lambda key, x: encode(init(x), key, x)[0], key, tree))

    return Messages(init, kept, encode, decode, size)
