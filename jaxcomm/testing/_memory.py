"""Checks which memory `encode` may change, and that `finalize` is equal on all workers."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxcomm._contract import Codec, Context, Memory, PyTree
from jaxcomm.testing._inputs import inputs
from jaxcomm.testing._law import require_equal
from jaxcomm.testing._single_worker import SentPayload, keys, send

SHARED, FINALIZED = "encode leaves shared memory", "finalize is equal on all workers"
STEPS = 3


def _combine(codec: Codec, step: SentPayload) -> tuple[PyTree, jax.Array]:
    """Returns the combined payloads, or None, and the decoded mean."""
    workers = len(step.decoded)
    if codec.combine is None:
        return None, step.decoded.mean(axis=0)
    first: Context = jax.tree.map(lambda leaf: leaf[0], step.contexts)
    if callable(codec.combine):
        total = _merge(functools.partial(codec.combine, first.coins), step.payloads)
    else:
        total = jax.tree.map(lambda leaf: leaf.sum(axis=0, dtype=leaf.dtype), step.payloads)
    return total, codec.decode(first.received(workers), total)


def _merge(merge: Callable[[PyTree, PyTree], PyTree], payloads: PyTree) -> PyTree:
    """Merges the payloads sequentially."""
    workers = len(jax.tree.leaves(payloads)[0])
    rows = [jax.tree.map(lambda leaf, i=i: leaf[i], payloads) for i in range(workers)]
    return functools.reduce(merge, rows)


def require_memory(codec: Codec, *, size: int, workers: int, seed: int) -> None:
    """Checks a few steps; a codec without memory passes."""

    @jax.jit
    def advance(x: jax.Array, memories: Memory, key: jax.Array) -> tuple[Memory, PyTree, Memory]:
        step = send(codec, x, memories, key)
        total, mean = _combine(codec, step)

        def finalize(context: Context, after: Memory) -> tuple[jax.Array, Memory]:
            return codec.finalize(context.replace(memory=after), total, mean)

        updates, final = jax.vmap(finalize)(step.contexts, step.after)
        return step.after, updates, final

    x = jnp.asarray(inputs(size, workers)["normal"], jnp.float32)
    memories = jax.vmap(codec.init)(x)
    for number, key in enumerate(keys(STEPS, seed)):
        what = f"in step {number} with {workers} workers, at "
        after, updates, final = advance(x, memories, key)
        require_equal(
            SHARED, after.shared, memories.shared, f"`memory.shared` after `encode` {what}"
        )
        for name, tree in {"the update": updates, "`memory.shared`": final.shared}.items():
            first = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), tree)
            require_equal(FINALIZED, tree, first, f"{name} after `finalize` {what}")
        memories = final.kept
