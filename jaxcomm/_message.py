"""A tree of arrays as one message of words, and back: one collective moves all of it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm._base import PyTree
from jaxcomm._units import LARGE

_TILE = 2**12


def _word(arrays: list[jax.Array]) -> np.dtype:
    """As wide as the narrowest array: the others are whole numbers of such words.

    TPUs lay out an array of bytes beside every word that is cut into them, with most of each
    register empty; what is wide already stays as it is.
    """
    width = min((array.dtype.itemsize for array in arrays), default=1)
    return np.dtype(f"uint{8 * min(width, 4)}")


def to_message(tree: PyTree) -> jax.Array:
    """The leaves' words laid end to end, uint8[...], uint16[...] or uint32[...].

    A large message is filled up to whole tiles of 4096 words: of any other, the compiler for TPU
    makes a sum over workers, with zeros for what the others have, which sends twice as much.
    """
    arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    word = _word(arrays)
    parts = [lax.bitcast_convert_type(array, word).ravel() for array in arrays]
    size = sum(part.size for part in parts)
    if size >= LARGE:
        parts.append(jnp.zeros(-size % _TILE, word))
    return jnp.concatenate(parts) if parts else jnp.zeros(0, word)


def from_message(message: jax.Array, like: PyTree) -> PyTree:
    """The tree whose message it is; `like` has its structure, shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(like)
    start, arrays = 0, []
    for leaf in leaves:
        words = leaf.dtype.itemsize // message.dtype.itemsize
        end = start + words * math.prod(leaf.shape)
        shape = (*leaf.shape, words) if words > 1 else leaf.shape
        arrays.append(lax.bitcast_convert_type(message[start:end].reshape(shape), leaf.dtype))
        start = end
    return jax.tree.unflatten(treedef, arrays)
