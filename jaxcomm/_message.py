"""A tree of arrays as one message of bytes, and back: one collective moves all of it."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._base import PyTree


def to_message(tree: PyTree) -> jax.Array:
    """The leaves' bytes laid end to end, uint8[bytes]."""

    def to_bytes(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.uint8).ravel()

    return jnp.concatenate([to_bytes(x) for x in jax.tree.leaves(tree)])


def from_message(message: jax.Array, like: PyTree) -> PyTree:
    """The tree whose message it is; `like` has its structure, shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(like)
    start, arrays = 0, []
    for leaf in leaves:
        size = leaf.dtype.itemsize
        end = start + size * math.prod(leaf.shape)
        shape = (*leaf.shape, size) if size > 1 else leaf.shape
        arrays.append(lax.bitcast_convert_type(message[start:end].reshape(shape), leaf.dtype))
        start = end
    return jax.tree.unflatten(treedef, arrays)
