"""What `encode` may change of a memory, and what workers share of it after `finalize`."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxcomm._base import Codec, Context, Memory, PyTree
from jaxcomm.testing._inputs import inputs
from jaxcomm.testing._law import require_equal
from jaxcomm.testing._single_worker import Sent, keys, send

SHARED, SETTLED = "encode leaves shared memory", "finalize is equal on all workers"
STEPS = 3


def _joined(codec: Codec, step: Sent) -> tuple[PyTree, jax.Array]:
    """What stands for the sum of payloads, and the mean that is decoded."""
    workers = len(step.decoded)
    if codec.combine is None:
        return None, step.decoded.mean(axis=0)
    first: Context = jax.tree.map(lambda leaf: leaf[0], step.contexts)
    if callable(codec.combine):
        total = _merged(functools.partial(codec.combine, first.coins), step.payloads)
    else:
        total = jax.tree.map(lambda leaf: leaf.sum(axis=0, dtype=leaf.dtype), step.payloads)
    return total, codec.decode(first.received(workers), total)


def _merged(merge: Callable[[PyTree, PyTree], PyTree], payloads: PyTree) -> PyTree:
    """Merged one after the other."""
    workers = len(jax.tree.leaves(payloads)[0])
    rows = [jax.tree.map(lambda leaf, i=i: leaf[i], payloads) for i in range(workers)]
    return functools.reduce(merge, rows)


def require_memory(codec: Codec, *, size: int, workers: int, seed: int) -> None:
    """Over a few steps; a codec without memory passes."""

    @jax.jit
    def advance(x: jax.Array, memories: Memory, key: jax.Array) -> tuple[Memory, PyTree, Memory]:
        step = send(codec, x, memories, key)
        total, mean = _joined(codec, step)

        def finalize(context: Context, after: Memory) -> tuple[jax.Array, Memory]:
            return codec.finalize(context.replace(memory=after), total, mean)

        updates, settled = jax.vmap(finalize)(step.contexts, step.after)
        return step.after, updates, settled

    x = jnp.asarray(inputs(size, workers)["normal"], jnp.float32)
    memories = jax.vmap(codec.init)(x)
    for number, key in enumerate(keys(STEPS, seed)):
        what = f"in step {number} of {workers} workers, at "
        after, updates, settled = advance(x, memories, key)
        require_equal(
            SHARED, after.shared, memories.shared, f"`memory.shared` after `encode` {what}"
        )
        for name, tree in {"the update": updates, "`memory.shared`": settled.shared}.items():
            first = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), tree)
            require_equal(SETTLED, tree, first, f"{name} after `finalize` {what}")
        memories = settled
