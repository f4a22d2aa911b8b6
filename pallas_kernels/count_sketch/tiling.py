r"""The slots and rolls of the tiles of an array in a sketch, and the signs of elements.

A tile is `planes` planes, and a plane is 8 sublanes of 128 lanes, 1024 elements. Row :math:`r`
maps tile :math:`t` of :math:`2^m` to the place

.. math:: p = (a_r t + b_r) \bmod 2^m, \quad a_r \text{ odd},

and the places are cut into runs whose lengths differ by at most one. Each run is a slot. Runs use
the high bits of p instead of its low bits. Tiles with equal low bits have equal low bits of p for
all :math:`a_r` and :math:`b_r`, and would collide in every row.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _hash

LANES = 128
SUBLANES = 8
PLANE = SUBLANES * LANES
MOST_PLANES = 32  # One per bit of a word: the planes share one word of signs.
FEWEST_SLOTS = 8

Scalar = Any  # uint32: an array, or a scalar within a kernel.


class Tiling(NamedTuple):
    """The shapes of a sketch of `size` elements by tiles. All are Python ints."""

    size: int
    planes: int  # Per tile.
    slots: int  # Per row of the table.
    tiles: int  # Tiles that hold elements.
    places: int  # 2**m, the smallest power of two that is at least `tiles`.

    @property
    def total_planes(self) -> int:
        """Planes that hold elements."""
        return -(-self.size // PLANE)

    @property
    def shortest(self) -> int:
        """The number of places of the shorter slots."""
        return self.places // self.slots

    @property
    def longer(self) -> int:
        """How many slots have one more place; these are the first slots."""
        return self.places % self.slots

    @property
    def longest(self) -> int:
        """The number of places of the longest slots."""
        return self.shortest + (self.longer > 0)


class Key(NamedTuple):
    """The parameters of the hash functions of one row, uint32 each."""

    multiplier: Scalar
    inverse: Scalar
    offset: Scalar
    first_roll: Scalar
    second_roll: Scalar
    first_sign: Scalar
    second_sign: Scalar


def planes_of_tile(columns: int) -> int:
    """The planes per tile: the largest power of two that leaves eight slots or more."""
    planes = MOST_PLANES
    while planes > 1 and (columns % (planes * PLANE) or columns < FEWEST_SLOTS * planes * PLANE):
        planes //= 2
    return planes


def tiling(size: int, columns: int, planes: int | None = None) -> Tiling:
    """The shapes of a sketch of `size` elements in rows of `columns`, a multiple of 1024."""
    planes = planes or planes_of_tile(columns)
    tiles = max(1, -(-size // (planes * PLANE)))
    return Tiling(size, planes, columns // (planes * PLANE), tiles, 1 << (tiles - 1).bit_length())


def keys(seeds: jax.Array, rows: int) -> jax.Array:
    """The keys of all rows, uint32[rows, 7]."""
    position = jnp.arange(rows * 8, dtype=jnp.uint32).reshape(rows, 8)
    words = _hash.bits(position, seeds[0], seeds[1])
    multiplier = words[:, 0] | 1
    inverse = (
        multiplier  # Correct in its lowest 3 bits; each step doubles the number of correct bits.
    )
    for _ in range(4):
        inverse = inverse * (2 - multiplier * inverse)
    return jnp.concatenate([jnp.stack([multiplier, inverse], axis=1), words[:, 1:6]], axis=1)


def first_place(shapes: Tiling, slot: Scalar) -> Scalar:
    """The first place of `slot`."""
    return slot * jnp.uint32(shapes.shortest) + jnp.minimum(slot, jnp.uint32(shapes.longer))


def tile_at(shapes: Tiling, key: Key, slot: Scalar, index: Scalar) -> tuple[Scalar, Scalar]:
    """The tile at place `index` of `slot`, and whether this place and tile exist."""
    place = first_place(shapes, slot) + index
    tile = (key.inverse * (place - key.offset)) & jnp.uint32(shapes.places - 1)
    longer = slot < jnp.uint32(shapes.longer)
    length = jnp.where(longer, jnp.uint32(shapes.longest), jnp.uint32(shapes.shortest))
    return tile, (index < length) & (tile < jnp.uint32(shapes.tiles))


def slot_of(shapes: Tiling, key: Key, tile: Scalar) -> Scalar:
    """The slot of `tile`."""
    place = (key.multiplier * tile + key.offset) & jnp.uint32(shapes.places - 1)
    if not shapes.shortest:  # More slots than places: one place per slot.
        return place
    if not shapes.longer:
        return place // jnp.uint32(shapes.shortest)
    # Places before the border are in the longer slots; the others count from the border.
    border = jnp.uint32(shapes.longer * shapes.longest)
    return jnp.where(
        place < border,
        place // jnp.uint32(shapes.longest),
        jnp.uint32(shapes.longer) + (place - border) // jnp.uint32(shapes.shortest),
    )


def rolls(shapes: Tiling, key: Key, tile: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    """The amounts by which `tile` is rolled along its planes, sublanes and lanes."""
    word = _hash.bits(tile, key.first_roll, key.second_roll)
    return word & jnp.uint32(shapes.planes - 1), (word >> 5) & 7, (word >> 8) & 127


def sign_word(shapes: Tiling, key: Key, tile: Scalar, within: Scalar) -> Scalar:
    """A word of signs of the element `within` each plane of `tile`, one bit per plane."""
    block = (tile * jnp.uint32(shapes.planes)) >> 5
    return _hash.bits(block * jnp.uint32(PLANE) + within, key.first_sign, key.second_sign)


def signed(x: Scalar, word: Scalar, plane: Scalar) -> Scalar:
    """`-x` if the bit of `plane` in the word of signs is set, else `x`."""
    return jnp.where((word >> (plane & 31)) & 1 != 0, -x, x)
