"""Small arrays as one array of bytes, since each array costs orbax a millisecond or more."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm.checkpoint._leaves import Leaf, stored
from jaxcomm.checkpoint._manifest import Entry

LARGEST = 2**20
"""The most bytes of an array in the pack."""


def _is_packed(array: Any) -> bool:
    whole_here = jax.process_count() == 1 or not isinstance(array, jax.Array)
    return 0 < array.nbytes <= LARGEST and (whole_here or array.is_fully_replicated)


def pack(arrays: Sequence[Any]) -> tuple[np.ndarray, list[int | None]]:
    """The bytes of the small arrays, and for each array where they begin; None if it is not packed.

    With several processes, only arrays that are equal on all of them are packed.
    """
    small = [array for array in arrays if _is_packed(array)]
    for array in small:
        if isinstance(array, jax.Array):
            array.copy_to_host_async()
    parts = [np.asarray(array).tobytes() for array in small]
    begins = iter(np.cumsum([0, *map(len, parts)]).tolist())
    offsets = [next(begins) if _is_packed(array) else None for array in arrays]
    return np.frombuffer(b"".join(parts), np.uint8), offsets


def unpack(packed: np.ndarray, entry: Entry, like: Leaf) -> Any:
    """A packed array of the shape of `entry`, where that of `like` is; keys as integers.

    Raises:
      ValueError: If it does not end within the pack.
    """
    of_like = jax.eval_shape(stored, like)
    shape = (*entry.shape, *of_like.shape[len(like.shape) :])
    dtype = like.dtype if isinstance(like, np.ndarray) else of_like.dtype
    count = int(np.prod(shape, dtype=np.int64))
    value = np.frombuffer(packed, jnp.dtype(dtype), count, entry.offset or 0).reshape(shape).copy()
    if isinstance(like, np.ndarray) or like.sharding is None:
        return value
    return jax.make_array_from_callback(shape, like.sharding, lambda index: value[index])
