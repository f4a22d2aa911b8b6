"""Packs a tree of arrays into one message of words, so that one collective moves all of it."""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import AxisName, PyTree
from jaxcomm._moved import as_moved
from jaxcomm._units import LARGE
from pallas_kernels._dispatch import target

_TILE = 2**12
_ROWS, _LANES = 8, 128  # Of one tile of an array in TPU memory.


def _word(arrays: list[jax.Array]) -> np.dtype:
    """The unsigned dtype as wide as the narrowest array; each other item is several such words.

    On TPUs, splitting a word into bytes leaves most of each register empty. Items of 4 bytes
    therefore stay words if no array is narrower.
    """
    width = min((array.dtype.itemsize for array in arrays), default=1)
    return np.dtype(f"uint{8 * min(width, 4)}")


def _fills_tiles(shape: tuple[int, ...]) -> bool:
    """Whether words of this shape fill whole memory tiles, if the target is a TPU."""
    flat = len(shape) == 1
    tiled = flat or (shape != () and shape[-1] % _LANES == shape[-2] % _ROWS == 0)
    return tiled and math.prod(shape) % _TILE == 0 and target().platform == "tpu"


def _to_tiles(words: jax.Array) -> jax.Array:
    """Words in the order of TPU memory, [rows, 128], so that the reshape copies nothing."""
    if words.ndim > 1:
        rows = words.reshape(-1, _ROWS, words.shape[-1] // _LANES, _LANES)
        words = rows.swapaxes(1, 2)
    return words.reshape(-1, _LANES)


def _from_tiles(tiles: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_to_tiles` for words of `shape`."""
    if len(shape) > 1:
        tiles = tiles.reshape(-1, shape[-1] // _LANES, _ROWS, _LANES).swapaxes(1, 2)
    return tiles.reshape(shape)


def to_message(tree: PyTree) -> jax.Array:
    """The words of all leaves, concatenated, uint8[...], uint16[...] or uint32[...].

    A large message is [rows, 128], in whole tiles of 4096 words. Leaves that fill tiles come first,
    tile by tile. The words of all other leaves follow, then zeros. For any other size, the TPU
    compiler gathers by a sum over workers, padded with zeros, which sends twice as many bytes. For
    another shape or order, it copies the whole message several times.
    """
    arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    word = _word(arrays)
    parts = [lax.bitcast_convert_type(array, word) for array in arrays]
    size = sum(part.size for part in parts)
    if size < LARGE:
        return jnp.concatenate([part.ravel() for part in parts]) if parts else jnp.zeros(0, word)
    tiles = [_to_tiles(part) for part in parts if _fills_tiles(part.shape)]
    rest = [part.ravel() for part in parts if not _fills_tiles(part.shape)]
    flat = jnp.concatenate([*rest, jnp.zeros(-size % _TILE, word)])
    return jnp.concatenate([*tiles, flat.reshape(-1, _LANES)])


def from_message(message: jax.Array, like: PyTree) -> PyTree:
    """The tree that `to_message` packed; `like` has its structure, shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(like)
    words = [leaf.dtype.itemsize // message.dtype.itemsize for leaf in leaves]
    shapes = [
        (*leaf.shape, count) if count > 1 else leaf.shape
        for leaf, count in zip(leaves, words, strict=True)
    ]
    tiled = [message.ndim > 1 and _fills_tiles(shape) for shape in shapes]
    rows = [math.prod(shape) // _LANES for shape in itertools.compress(shapes, tiled)]
    rest = message[sum(rows) :].ravel()
    row, start, arrays = 0, 0, []
    for leaf, shape, in_tiles in zip(leaves, shapes, tiled, strict=True):
        size = math.prod(shape)
        if in_tiles:
            part = _from_tiles(message[row : row + size // _LANES], shape)
            row += size // _LANES
        else:
            part = rest[start : start + size].reshape(shape)
            start += size
        arrays.append(lax.bitcast_convert_type(part, leaf.dtype))
    return jax.tree.unflatten(treedef, arrays)


class Message(NamedTuple):
    """A tree and the words to send for it over an axis."""

    axis_name: AxisName
    contents: PyTree
    words: jax.Array

    def moved(
        self, move: Callable[[jax.Array], jax.Array], like: PyTree = None, *, many: bool = False
    ) -> PyTree:
        """The contents as received, with a derivative.

        Args:
          move: The exchange, as in :func:`jaxcomm._moved.as_moved`.
          like: A tree like the contents of one message. Default: these contents.
          many: Whether `move` returns several messages, `[senders, words]`.
        """
        if _axis.is_simulated(self.axis_name):
            return jax.tree.map(move, self.contents)
        like = self.contents if like is None else like
        unpack = lambda words: from_message(words, like)  # noqa: E731
        received = (jax.vmap(unpack) if many else unpack)(move(self.words))
        return as_moved(move, self.contents, received)


def gather_contents(axis_name: AxisName, contents: PyTree) -> PyTree:
    """The contents of all workers, `[workers, ...]`, equal on all workers."""
    message = Message(axis_name, contents, to_message(contents))
    return message.moved(lambda x: _axis.gather(x, axis_name), many=True)


def exchange_rows(axis_name: AxisName, rows: PyTree) -> PyTree:
    """Sends row k of all leaves `[workers, ...]` to worker k; returns what this worker receives."""
    like = jax.tree.map(lambda x: jax.eval_shape(lambda x: x[0], x), rows)
    message = Message(axis_name, rows, jax.vmap(to_message)(rows))
    return message.moved(lambda x: _axis.exchange(x, axis_name), like, many=True)
