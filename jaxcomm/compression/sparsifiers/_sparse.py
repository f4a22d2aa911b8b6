r"""Values and their indices, which take the shortest of three codes of fixed length.

- *fixed*: each index in :math:`\lceil \log_2 b \rceil` bits, with `b` the size of its block.
- *Elias-Fano*: for :math:`k` ascending indices below :math:`d`, the low :math:`l` bits of each, and
  the high bits in unary: :math:`k l + k + \lfloor (d - 1) / 2^l \rfloor` bits. This is about
  :math:`2 + \log_2 (d / k)` per index, half a bit more than Golomb's code of the gaps, whose length
  depends on the data.
- *bitmap*: :math:`d` bits, if many coordinates are sent.

The length is known at trace time, as XLA requires.

References:
  Elias, `Efficient Storage and Retrieval by Content and Address of Static Files
  <https://doi.org/10.1145/321812.321820>`_, 1974.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import Context, Entries, scatter
from jaxcomm.compression import _bits
from jaxcomm.compression._bits import Alphabet, Integers, require_countable
from jaxcomm.compression._means import how_many
from jaxcomm.compression.sparsifiers._largest import Magnitude, identity, largest, places


class IndexCode(NamedTuple):
    """How `entries` indices below `size` are encoded."""

    code: Literal["fixed", "elias_fano", "bitmap"]
    entries: int
    size: int
    block: int  # of the fixed code; each run of `entries * block / size` indices is in one block
    low: int  # of the Elias-Fano code: the number of low bits of an index

    @property
    def bits(self) -> int:
        """The length of the code."""
        if self.code == "bitmap":
            return self.size
        if self.code == "fixed":
            return self.entries * (self.block - 1).bit_length()
        return self.entries * self.low + self._unary

    @property
    def _unary(self) -> int:
        return self.entries + ((self.size - 1) >> self.low) if self.entries else 0


def choose_layout(
    count: int, size: int, *, block: int | None = None, distinct: bool = True
) -> IndexCode:
    """Returns the shortest code.

    Args:
      count: The number of indices, which are in ascending order.
      size: An upper bound of the indices, exclusive.
      block: The size of a block, if each block has the same number of the indices.
      distinct: Whether no index occurs twice; otherwise a bitmap cannot represent them.
    """
    # `size` may count the index of unused entries, one past the last coordinate.
    require_countable(size - 1)
    candidates = [IndexCode("fixed", count, size, block or size, 0)]
    candidates += [
        IndexCode("elias_fano", count, size, size, low) for low in range(size.bit_length())
    ]
    if distinct:
        candidates.append(IndexCode("bitmap", count, size, size, 0))
    return min(candidates, key=lambda layout: layout.bits)


def layout_with_unused(count: Callable[[int], int]) -> Callable[[int], IndexCode]:
    """`size -> layout`; an unused entry has the index `size`, one past the last coordinate."""
    return lambda size: choose_layout(count(size), size + 1, distinct=False)


def pack_indices(indices: jax.Array, layout: IndexCode) -> jax.Array:
    """Packs ascending uint32[count] into uint32[ceil(bits / 32)]."""
    if layout.code == "bitmap":
        return _bits.pack_bits(_marked(indices, layout.size))
    if layout.code == "fixed":
        return _bits.pack_numbers(
            indices % jnp.uint32(layout.block), (layout.block - 1).bit_length()
        )
    high = (indices >> layout.low) + jnp.arange(layout.entries, dtype=jnp.uint32)
    low = (indices & jnp.uint32(2**layout.low - 1))[None] >> _planes(layout.low)
    return _bits.pack_bits(
        jnp.concatenate([_marked(high, layout._unary), (low & jnp.uint32(1)).ravel() == 1])
    )


def unpack_indices(words: jax.Array, layout: IndexCode) -> jax.Array:
    """The inverse of `pack_indices`: uint32[count]."""
    count = layout.entries
    if layout.code == "fixed":
        inside = _bits.unpack_numbers(words, (layout.block - 1).bit_length(), count)
        per_block = max(count * layout.block // max(layout.size, 1), 1)
        return inside + jnp.arange(count, dtype=jnp.uint32) // per_block * jnp.uint32(layout.block)
    bits = _bits.unpack_bits(words, layout.bits)
    if layout.code == "bitmap":
        return _positions(bits, count)
    high = _positions(bits[: layout._unary], count) - jnp.arange(count, dtype=jnp.uint32)
    planes = bits[layout._unary :].reshape(layout.low, count).astype(jnp.uint32)
    low = jnp.sum(planes << _planes(layout.low), axis=0, dtype=jnp.uint32)
    return (high << layout.low) + low


def _planes(width: int) -> jax.Array:
    return jnp.arange(width, dtype=jnp.uint32)[:, None]


def _marked(positions: jax.Array, size: int) -> jax.Array:
    """bool[size] that is true at the positions."""
    return jnp.zeros(size, bool).at[positions].set(True, mode="drop")


def _positions(bits: jax.Array, count: int) -> jax.Array:
    """The positions of the first `count` true elements, which exist, uint32[count]."""
    return places(bits, count).astype(jnp.uint32)


def integers_of_indices(kept: Callable[[int], int], layout: Callable[[int], IndexCode]) -> Integers:
    """The integers of payloads whose `indices` are `kept(size)` distinct ones in this layout."""

    def alphabet(context: Context) -> Alphabet:
        size = math.prod(context.shape)
        return Alphabet(kept(size) if size else 0, 0, max(size - 1, 0))

    def split(context: Context, payload: Any) -> tuple[jax.Array, Any]:
        indices = unpack_indices(payload.indices, layout(math.prod(context.shape)))
        return indices.astype(jnp.int32), payload._replace(indices=())

    def join(context: Context, indices: jax.Array, rest: Any) -> Any:
        packed = pack_indices(indices.astype(jnp.uint32), layout(math.prod(context.shape)))
        return rest._replace(indices=packed)

    return Integers("indices", alphabet, split, join, lambda size: kept(size) / size, certain=True)


class Selection(NamedTuple):
    r"""Which coordinates of its input a sparsifier sends as they are.

    .. math:: C(x) = \gamma \sum_{j \in S} x_j e_j

    :math:`\gamma` is 1 for a codec that claims a contraction. For one that claims a variance
    :math:`\omega` it is :math:`1 + \omega`, one over the probability that :math:`j \in S`: no other
    factor is unbiased.

    Attributes:
      choose: `(shared, flat) -> uint32[layout(size).entries]`, the selected coordinates, ascending.
        Those that are not below the size name none; they are below `layout(size).size`.
      layout: `size -> IndexCode`, the code of these indices.
      drawn: Whether receivers choose the same from the shared key: `choose` then reads only the
        size of `flat`.
      value_dtype: The dtype in which `encode` sends the values.
    """

    choose: Callable[[jax.Array, jax.Array], jax.Array]
    layout: Callable[[int], IndexCode]
    drawn: bool
    value_dtype: Any


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
        return lambda size: min(k, require_countable(size))
    share = 1.0 if ratio is None else ratio
    return lambda size: min(max(round(share * require_countable(size)), 1), size)


def require_value_dtype(value_dtype: Any) -> jnp.dtype:
    """The dtype, if values may be sent in it."""
    dtype = jnp.dtype(value_dtype)
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"`value_dtype` must be float32 or bfloat16, got {dtype}.")
    return dtype


def select(
    x: jax.Array, wanted: jax.Array, capacity: int, magnitude: Magnitude = identity
) -> tuple[jax.Array, jax.Array]:
    """The positions of the wanted coordinates; if more than `capacity`, those of largest magnitude.

    Magnitudes are compared only if there are more than `capacity`.

    Returns:
      uint32[capacity], ascending, with `size` in unused entries; and int32[], the number of wanted
      coordinates beyond `capacity`.
    """
    size = x.size
    count = how_many(wanted)
    if not size:
        return jnp.zeros(0, jnp.uint32), count

    def all_wanted() -> jax.Array:
        return places(wanted, capacity).astype(jnp.uint32)

    indices = lax.cond(
        count <= capacity,
        all_wanted,
        lambda: largest(jnp.where(wanted, magnitude(x), -1), capacity),
    )
    return indices, jnp.maximum(count - capacity, 0)


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
