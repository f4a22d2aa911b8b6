"""Small arrays as one file of bytes, since each array costs orbax two milliseconds of a core."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.checkpoint._leaves import Leaf, stored
from jaxcomm.checkpoint._manifest import Entry

LARGEST = 2**20
"""The most bytes of an array in the pack."""


def is_packed(array: Any) -> bool:
    """Whether an array is small, and whole on every process."""
    whole_here = jax.process_count() == 1 or not isinstance(array, jax.Array)
    return 0 < array.nbytes <= LARGEST and (whole_here or array.is_fully_replicated)


def pack(arrays: Sequence[Any]) -> tuple[list[np.ndarray], list[int | None]]:
    """Copies of the bytes of the small arrays, and where each array begins; None: not packed.

    With several processes, only arrays that are equal on all of them are packed.
    """
    small = [array for array in arrays if is_packed(array)]
    for array in small:
        if isinstance(array, jax.Array):
            array.copy_to_host_async()
    # A view would keep a buffer that the next step may overwrite.
    parts = [np.frombuffer(np.asarray(array).tobytes(), np.uint8) for array in small]
    begins = iter(np.cumsum([0, *map(len, parts)]).tolist())
    return parts, [next(begins) if is_packed(array) else None for array in arrays]


def _layout(entry: Entry, like: Leaf) -> tuple[tuple[int, ...], np.dtype[Any]]:
    of_like = jax.eval_shape(stored, like)
    shape = (*entry.shape, *of_like.shape[len(like.shape) :])
    return shape, jnp.dtype(like.dtype if isinstance(like, np.ndarray) else of_like.dtype)


def bytes_of(packed: bytes, entry: Entry, like: Leaf) -> memoryview:
    """The bytes of a packed array."""
    shape, dtype = _layout(entry, like)
    begin = entry.offset or 0
    return memoryview(packed)[begin : begin + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize]


def unpack(packed: bytes, entry: Entry, like: Leaf) -> Any:
    """A packed array of the shape of `entry`, where that of `like` is; keys as integers.

    Raises:
      ValueError: If it does not end within the pack.
    """
    shape, dtype = _layout(entry, like)
    count = int(np.prod(shape, dtype=np.int64))
    value = np.frombuffer(packed, dtype, count, entry.offset or 0).reshape(shape).copy()
    if isinstance(like, np.ndarray) or like.sharding is None:
        return value
    return jax.make_array_from_callback(shape, like.sharding, lambda index: value[index])
