r"""Where the tiles of an array go in a sketch, which rolls they take, and the signs of elements.

A tile is `planes` planes of 8 sublanes of 128 lanes, and 1024 elements are a plane. Row :math:`r`
sends tile :math:`t` of :math:`2^m` to the place

.. math:: p = (a_r t + b_r) \bmod 2^m, \quad a_r \text{ odd},

and the places are cut into runs of equal length (to one), a run a slot. Runs, that is the high bits
of p, and not its low bits: tiles that agree in their low bits would agree in those of p whatever
:math:`a_r` and :math:`b_r` are, and so collide in every row.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _hash

LANES = 128
SUBLANES = 8
PLANE = SUBLANES * LANES
MOST_PLANES = 32  # As many planes as a word has bits: they share one word of signs.
FEWEST_SLOTS = 8

Scalar = Any  # uint32, an array or, within a kernel, a scalar.


class Tiling(NamedTuple):
    """The shapes of a sketch of `size` elements by tiles. All are Python ints."""

    size: int
    planes: int  # Of one tile.
    slots: int  # Of one row of the table.
    tiles: int  # That hold elements.
    places: int  # 2**m, the least such that is not below tiles.

    @property
    def total_planes(self) -> int:
        """Planes that hold elements."""
        return -(-self.size // PLANE)

    @property
    def shortest(self) -> int:
        """Places of the slots that have fewest."""
        return self.places // self.slots

    @property
    def longer(self) -> int:
        """How many slots, the first ones, have one place more."""
        return self.places % self.slots

    @property
    def longest(self) -> int:
        """Places of the slots that have most."""
        return self.shortest + (self.longer > 0)


class Key(NamedTuple):
    """What makes one row's hash functions, uint32 each."""

    multiplier: Scalar
    inverse: Scalar
    offset: Scalar
    first_roll: Scalar
    second_roll: Scalar
    first_sign: Scalar
    second_sign: Scalar


def planes_of_tile(columns: int) -> int:
    """The size of a tile in planes: the largest power of two that leaves eight slots or more."""
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
    inverse = multiplier  # Right in its lowest 3 bits, and in twice as many after every step.
    for _ in range(4):
        inverse = inverse * (2 - multiplier * inverse)
    return jnp.concatenate([jnp.stack([multiplier, inverse], axis=1), words[:, 1:6]], axis=1)


def first_place(shapes: Tiling, slot: Scalar) -> Scalar:
    """The first of the places that make `slot`."""
    return slot * jnp.uint32(shapes.shortest) + jnp.minimum(slot, jnp.uint32(shapes.longer))


def tile_at(shapes: Tiling, key: Key, slot: Scalar, index: Scalar) -> tuple[Scalar, Scalar]:
    """The tile at the place `index` of `slot`, and whether there are such a place and tile."""
    place = first_place(shapes, slot) + index
    tile = (key.inverse * (place - key.offset)) & jnp.uint32(shapes.places - 1)
    longer = slot < jnp.uint32(shapes.longer)
    length = jnp.where(longer, jnp.uint32(shapes.longest), jnp.uint32(shapes.shortest))
    return tile, (index < length) & (tile < jnp.uint32(shapes.tiles))


def slot_of(shapes: Tiling, key: Key, tile: Scalar) -> Scalar:
    """The slot that `tile` goes to."""
    place = (key.multiplier * tile + key.offset) & jnp.uint32(shapes.places - 1)
    if not shapes.shortest:  # More slots than places: one a slot.
        return place
    if not shapes.longer:
        return place // jnp.uint32(shapes.shortest)
    # Of the longer slots, or else counted from the first of the others.
    border = jnp.uint32(shapes.longer * shapes.longest)
    return jnp.where(
        place < border,
        place // jnp.uint32(shapes.longest),
        jnp.uint32(shapes.longer) + (place - border) // jnp.uint32(shapes.shortest),
    )


def rolls(shapes: Tiling, key: Key, tile: Scalar) -> tuple[Scalar, Scalar, Scalar]:
    """By how much `tile` is rolled along its planes, sublanes and lanes."""
    word = _hash.bits(tile, key.first_roll, key.second_roll)
    return word & jnp.uint32(shapes.planes - 1), (word >> 5) & 7, (word >> 8) & 127


def sign_word(shapes: Tiling, key: Key, tile: Scalar, within: Scalar) -> Scalar:
    """A word of signs of the element `within` each plane of `tile`: that of a plane is its bit."""
    block = (tile * jnp.uint32(shapes.planes)) >> 5
    return _hash.bits(block * jnp.uint32(PLANE) + within, key.first_sign, key.second_sign)


def signed(x: Scalar, word: Scalar, plane: Scalar) -> Scalar:
    """`x` or its negative, as the bit of `plane` in the word of signs says."""
    return jnp.where((word >> (plane & 31)) & 1 != 0, -x, x)
