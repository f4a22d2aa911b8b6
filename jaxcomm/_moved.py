"""The derivative of an exchange whose messages are words."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxcomm._base import PyTree


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _as_moved(
    move: Callable[[jax.Array], jax.Array], sent: list[jax.Array], received: list[jax.Array]
) -> list[jax.Array]:
    return received


@_as_moved.defjvp
def _moved_tangents(
    move: Callable[[jax.Array], jax.Array],
    primals: tuple[list[jax.Array], list[jax.Array]],
    tangents: tuple[list[jax.Array], list[jax.Array]],
) -> tuple[list[jax.Array], list[jax.Array]]:
    # At least 32 bits, since narrow floats would be moved as words.
    wide = [x if x.dtype.itemsize >= 4 else x.astype(jnp.float32) for x in tangents[0]]
    narrow = [move(x).astype(y.dtype) for x, y in zip(wide, primals[1], strict=True)]
    return primals[1], narrow


def as_moved(move: Callable[[jax.Array], jax.Array], sent: PyTree, received: PyTree) -> PyTree:
    """`received`, with the derivative of `move` applied to each float of `sent`.

    A message consists of words, and a bitcast to them would make each derivative 0.

    Args:
      move: The exchange, linear, of an array of any shape and dtype. It may hold no traced value,
        nor an axis that `jax.vmap` binds: JAX calls it later.
      sent: The tree that was sent.
      received: The tree that `move` makes of it.
    """
    before, (after, treedef) = jax.tree.leaves(sent), jax.tree.flatten(received)
    floats = [i for i, x in enumerate(after) if jnp.issubdtype(x.dtype, jnp.floating)]
    if floats:
        moved = _as_moved(move, [before[i] for i in floats], [after[i] for i in floats])
        for i, x in zip(floats, moved, strict=True):
            after[i] = x
    return jax.tree.unflatten(treedef, after)
