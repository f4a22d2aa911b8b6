"""Shared by sparsifiers: the number of coordinates to send, and a payload of indices and values."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import Entries, scatter
from jaxcomm.compression._bits import require_countable
from jaxcomm.compression._means import how_many
from jaxcomm.compression.sparsifiers._indices import IndexCode, pack_indices, unpack_indices
from jaxcomm.compression.sparsifiers._largest import Magnitude, identity, largest
from jaxcomm.compression.sparsifiers._selection import places

Count: TypeAlias = Callable[[int], int]


class SparsePayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf)."""

    indices: jax.Array  # uint32[ceil(bits / 32)], as `choose_layout` says
    values: jax.Array  # value_dtype[count]


def make_count(ratio: float | None, k: int | None) -> Count:
    """Returns `size -> count`: `ratio` times the size, at least 1, or `k`, at most the size.

    Raises:
      ValueError: Unless exactly one of `ratio` and `k` is set, and in range.
    """
    if (ratio is None) == (k is None):
        raise ValueError(f"Pass exactly one of `ratio` and `k`, got `ratio`={ratio} and `k`={k}.")
    if k is not None:
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise ValueError(
                f"`k` must be a Python int of at least 1, got {k!r}: it decides shapes on the "
                "wire. Under `optax.inject_hyperparams` pass `static_args=('k',)`."
            )
        return lambda size: min(k, require_countable(size))
    if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ValueError(
            f"`ratio` must be a Python float in (0, 1], got {ratio!r}: it decides shapes on the "
            "wire. Under `optax.inject_hyperparams` pass `static_args=('ratio',)`."
        )
    return lambda size: min(max(round(ratio * require_countable(size)), 1), size)


def require_value_dtype(value_dtype: Any) -> jnp.dtype:
    """The dtype, if values may be sent in it."""
    dtype = jnp.dtype(value_dtype)
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"`value_dtype` must be float32 or bfloat16, got {dtype}.")
    return dtype


def select(
    x: jax.Array, wanted: jax.Array, room: int, magnitude: Magnitude = identity
) -> tuple[jax.Array, jax.Array]:
    """The positions of the wanted coordinates; if more than `room`, those of largest magnitude.

    Magnitudes are compared only if there are more than `room`.

    Returns:
      uint32[room], ascending, with `size` in unused entries; and int32[], the number of wanted
      coordinates beyond `room`.
    """
    size = x.size
    count = how_many(wanted)
    if not size:
        return jnp.zeros(0, jnp.uint32), count

    def all_wanted() -> jax.Array:
        return places(wanted, room).astype(jnp.uint32)

    indices = lax.cond(
        count <= room, all_wanted, lambda: largest(jnp.where(wanted, magnitude(x), -1), room)
    )
    return indices, jnp.maximum(count - room, 0)


def to_payload(flat: jax.Array, indices: jax.Array, layout: IndexCode, dtype: Any) -> SparsePayload:
    """The payload of the coordinates of `flat` at ascending `indices`."""
    values = flat.at[indices].get(mode="fill", fill_value=0)
    return SparsePayload(pack_indices(indices, layout), values.astype(dtype))


def to_dense(values: jax.Array, indices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """float32 zeros with the values added at the indices; indices beyond the size are dropped."""
    require_countable(math.prod(shape))
    return scatter(Entries(indices, values.astype(jnp.float32)), shape)


def from_payload(payload: SparsePayload, layout: IndexCode, shape: tuple[int, ...]) -> jax.Array:
    """Decodes the payload to float32[shape]."""
    return to_dense(payload.values, unpack_indices(payload.indices, layout), shape)
