"""What a policy is: functions that decide what an event changes and who begins; its messages."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxcomm._contract import Codec, Coins, Context, PyTree


class Event(NamedTuple):
    """A worker finishes a gradient."""

    worker: jax.Array  # int32[]
    number: jax.Array  # int32[], the gradients that it finished before: its clock
    position: jax.Array  # int32[], the events before this one
    staleness: jax.Array  # int32[], the events of others since it began this gradient
    seconds: jax.Array  # float32[], the simulated time
    key: jax.Array  # key[], different for each event


class Sent(NamedTuple):
    """The messages of an event: what the worker sends, and what it receives in reply."""

    uploads: jax.Array  # int32[], messages
    upload_bytes: jax.Array  # int32[]
    downloads: jax.Array  # int32[], messages
    download_bytes: jax.Array  # int32[]


Work: TypeAlias = Callable[[PyTree, Event], tuple[jax.Array, PyTree]]
"""`(point, event) -> (loss, result)`; for most policies, a loss and its gradient at `point`."""


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
      The counts, int32[] each.

    Example:
      >>> from jaxcomm.synchronization.events import sent
      >>> print(sent(uploads=1, upload_bytes=400).upload_bytes)
      400
    """
    counts = (uploads, upload_bytes, downloads, download_bytes)
    return Sent(*(jnp.asarray(count, jnp.int32) for count in counts))


class Policy(NamedTuple):
    """Who waits for whom, and what the parameters become: pure functions of one state.

    All but `init` run in a `jax.lax.scan`, once per event. They may read and write a few rows of
    arrays [workers, ...]. They must not compute new arrays of that size, except arrays [workers].

    Attributes:
      init: `(params, workers) -> state`, before the first event.
      point: `(state, event) -> point`, what the gradient of the event is evaluated at. It is called
        when the gradient is finished. So it must not depend on what changed since the worker began:
        a policy keeps a copy for the worker if others may change it meanwhile.
      finish: `(state, event, result) -> (state, Sent)`, the effect of the event and its messages.
      model: `state -> params`, the parameters that the method returns; called outside the scan.
      begins: `(state, idle) -> bool[workers]`, the workers that now begin their next gradient.
        `idle`, bool[workers], has the workers that compute nothing. By default, all of them. If no
        worker computes, all later times are NaN.
      work: A function from the user's `(point, event) -> (loss, result)` to that of the policy,
        such as one that evaluates a gradient at two points. By default, the same.
      restarts: Whether a worker in `begins` that is not idle abandons its gradient and restarts.
    """

    init: Callable[[PyTree, int], Any]
    point: Callable[[Any, Event], PyTree]
    finish: Callable[[Any, Event, PyTree], tuple[Any, Sent]]
    model: Callable[[Any], PyTree]
    begins: Callable[[Any, jax.Array], jax.Array] = lambda state, idle: idle
    work: Callable[[Work], Work] = lambda work: work
    restarts: bool = False


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

    def init(tree: PyTree) -> PyTree:
        return [codec.init(x.astype(jnp.float32)) for x in jax.tree.leaves(tree)]

    def encoded(memory: Any, key: jax.Array, x: jax.Array) -> tuple[Context, PyTree, Any]:
        context = Context(Coins(*jax.random.split(key)), memory, shape=x.shape)
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
