r"""The slots of the tiles of an array in a sketch, moves within tiles, and signs of elements.

A tile is `planes` planes, and a plane is 8 sublanes of 128 lanes, 1024 elements. Tiles are dealt to
the n slots of a row in rounds, as cards are dealt to players. Round i has the tiles from i n to
i n + n - 1, of which each slot gets one. In row r, tile i n + j goes to the slot

.. math:: (\pi_{ri}(j) + o_{ri}) \bmod n

for a mixing bijection :math:`\pi_{ri}` of [0, n) and an offset :math:`o_{ri}`. With the smallest
:math:`2^m \ge n`, odd multipliers, and :math:`s = \lceil m / 2 \rceil`, the bijection repeats

.. math:: y \gets a (y + b), \quad y \gets y \oplus (y \gg s), \quad y \gets a' y, \quad
          y \gets y \oplus (y \gg s), \quad y \gets a'' y \pmod{2^m}

until y is below n (cycle walking): fewer than two times in the mean, and once if n is a power of
two. All parameters are hashes of the row and the round. For hashes that are uniform and
independent, this is what holds, whatever the numbers of tiles and slots are:

- Each row is a bijection of tiles and places, since each step can be undone, and the walk stays in
  its cycle. All slots have the same number of tiles, but for the last round. No place is empty.
- Two tiles of one round never share a slot. Two tiles of different rounds share one with
  probability 1/n: given the slot of the other tile, the offset makes that of this tile uniform.
- What rows do is independent, and the rounds of a row are.

Within its tile, the element of plane p, sublane s and lane l goes to

.. math:: P = p + r, \quad L = l + b + c \lfloor s / 2 \rfloor, \quad
          S = s + \lfloor f w_L / 2^{29} \rfloor + a

modulo the planes, the 128 lanes and the 8 sublanes. A hash of the row and the tile has r, a, b, c
in bits of their own. Its odd factor f has all bits but those of a. The fixed words :math:`w_L` are
the same in all sketches. For such hashes this holds:

- It is a bijection: planes are rolled, then each sublane along its lanes, and then each lane along
  its sublanes.
- Given all bits but those of a, S is uniform. Given c, so are P and L, and they are independent. So
  the place is uniform in the tile, and two elements of different tiles of one slot meet with
  probability 1/(1024 planes). With that of the slot, it is one over the columns.
- Signs belong to places of a tile, so those of elements that meet are independent of each other
  and of all moves. So the estimate is unbiased.
- Elements of a sublane meet those of another tile in some of their lanes only: their turns differ
  from lane to lane. Those of a lane separate by pairs of sublanes. But a plane stays a plane.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _hash

LANES = 128
SUBLANES = 8
PLANE = SUBLANES * LANES
MOST_PLANES = 32
FEWEST_SLOTS = 8
ROLLED_TOGETHER = 2  # Sublanes, along lanes.
SIGNED_TOGETHER = 4  # Planes: a word has the signs of one lane in 8 sublanes of each.

STEP = 128  # Planes that a step of a kernel reads at least, if the array has as many.
AT_ONCE = 512  # Planes of a row's partial sums, which blocks of a GPU compute at once.
MOST_PARTS = 64
FEWEST_ROUNDS = 8  # Per part.

Scalar = Any  # uint32: an array, or a scalar within a kernel.


class Tiling(NamedTuple):
    """The shapes of a sketch of `size` elements by tiles. All are Python ints."""

    size: int
    planes: int  # Per tile.
    slots: int  # Per row of the table.
    tiles: int
    rounds: int  # The last one may have fewer tiles than slots.
    part: int  # Rounds that are added one after the other. Then the sums of parts are added.

    @property
    def total_planes(self) -> int:
        """Planes that hold elements."""
        return -(-self.size // PLANE)

    @property
    def parts(self) -> int:
        return -(-self.rounds // self.part)


class Key(NamedTuple):
    """The parameters of the hash functions of one row, uint32 each."""

    first_deal: Scalar
    second_deal: Scalar
    first_move: Scalar
    second_move: Scalar
    first_sign: Scalar
    second_sign: Scalar


class Deal(NamedTuple):
    """The parameters of one round of one row: the bijection's, and the offset."""

    multipliers: tuple[Scalar, Scalar, Scalar]
    added: Scalar
    offset: Scalar


class Move(NamedTuple):
    """How a tile is moved in one row; `factor` is odd."""

    plane: Scalar
    sublane: Scalar
    lane: Scalar
    per_sublane: Scalar
    factor: Scalar


def planes_of_tile(columns: int) -> int:
    """The planes per tile: the largest power of two that leaves eight slots or more."""
    planes = MOST_PLANES
    while planes > 1 and (columns % (planes * PLANE) or columns < FEWEST_SLOTS * planes * PLANE):
        planes //= 2
    return planes


def tiling(size: int, columns: int, planes: int | None = None, step: int = STEP) -> Tiling:
    """The shapes of a sketch of `size` elements in rows of `columns`, a multiple of 1024.

    `planes` and `step` are for tests of small arrays.
    """
    planes = planes or planes_of_tile(columns)
    tiles = max(1, -(-size // (planes * PLANE)))
    slots = columns // (planes * PLANE)
    rounds = -(-tiles // slots)
    together = max(1, step // (slots * planes))  # Rounds per step of a kernel.
    most = rounds // max(FEWEST_ROUNDS, together)
    parts = max(1, min(MOST_PARTS, AT_ONCE // (slots * planes), most))
    part = -(-rounds // (parts * together)) * together
    return Tiling(size, planes, slots, tiles, rounds, part)


def keys(seeds: jax.Array, rows: int) -> jax.Array:
    """The keys of all rows, uint32[rows, 6]."""
    position = jnp.arange(rows * 8, dtype=jnp.uint32).reshape(rows, 8)
    return _hash.bits(position, seeds[0], seeds[1])[:, : len(Key._fields)]


def below(word: Scalar, number: int) -> Scalar:
    """The exact high 32 of the 64 bits of `word * number`: floor(word * number / 2**32)."""
    number_low, number_high = jnp.uint32(number & 0xFFFF), jnp.uint32(number >> 16)
    low, high = word & 0xFFFF, word >> 16
    carried = high * number_low + ((low * number_low) >> 16)
    if not number >> 16:
        return carried >> 16
    middle = low * number_high + (carried & 0xFFFF)
    return high * number_high + (carried >> 16) + (middle >> 16)


def deal(shapes: Tiling, key: Key, round_: Scalar) -> Deal:
    """The parameters of a round: three hashed words."""
    first, second, third = (
        _hash.bits(round_ * 4 + i, key.first_deal, key.second_deal) for i in range(3)
    )
    multipliers = first | 1, (first >> 16) | 1, second | 1
    return Deal(multipliers, second >> 16, below(third, shapes.slots))


def _modulus(slots: int) -> tuple[Scalar, int]:
    """2**m - 1, and the shift by half of m bits, which undoes itself when it is applied twice."""
    bits = (slots - 1).bit_length()
    return jnp.uint32((1 << bits) - 1), max(1, (bits + 1) // 2)


def _walk(step: Callable[[Scalar], Scalar], start: Scalar, slots: int) -> Scalar:
    """The first of step(start), step(step(start)), ... that is below `slots`."""
    first = step(start)
    if slots & (slots - 1) == 0:
        return first
    beyond = lambda y: y >= jnp.uint32(slots)  # noqa: E731
    any_beyond = lambda y: jnp.any(beyond(y)) if jnp.ndim(y) else beyond(y)  # noqa: E731
    return lax.while_loop(any_beyond, lambda y: jnp.where(beyond(y), step(y), y), first)


def slot_of(shapes: Tiling, key: Key, tile: Scalar) -> Scalar:
    """The slot of `tile`."""
    round_ = tile // jnp.uint32(shapes.slots)
    dealt = deal(shapes, key, round_)
    mask, shift = _modulus(shapes.slots)

    def mixed(y: Scalar) -> Scalar:
        y = (y + dealt.added) * dealt.multipliers[0] & mask
        y = (y ^ (y >> shift)) * dealt.multipliers[1] & mask
        return (y ^ (y >> shift)) * dealt.multipliers[2] & mask

    start = tile - round_ * jnp.uint32(shapes.slots)
    slot = _walk(mixed, start, shapes.slots) + dealt.offset
    return jnp.where(slot >= jnp.uint32(shapes.slots), slot - jnp.uint32(shapes.slots), slot)


def _inverse(multiplier: Scalar) -> Scalar:
    """The inverse of an odd number modulo 2**24; there are fewer slots than that."""
    inverse = multiplier  # Correct in its lowest 3 bits; each step doubles the number.
    for _ in range(3):
        inverse = inverse * (2 - multiplier * inverse)
    return inverse


def tile_at(shapes: Tiling, key: Key, slot: Scalar, round_: Scalar) -> tuple[Scalar, Scalar]:
    """The tile that `slot` gets in a round, and whether there is one."""
    dealt = deal(shapes, key, round_)
    mask, shift = _modulus(shapes.slots)
    inverses = [*map(_inverse, dealt.multipliers)]

    def unmixed(y: Scalar) -> Scalar:
        y = y * inverses[2] & mask
        y = (y ^ (y >> shift)) * inverses[1] & mask
        return ((y ^ (y >> shift)) * inverses[0] - dealt.added) & mask

    back = slot - dealt.offset
    back = jnp.where(slot < dealt.offset, back + jnp.uint32(shapes.slots), back)
    tile = round_ * jnp.uint32(shapes.slots) + _walk(unmixed, back, shapes.slots)
    return tile, tile < jnp.uint32(shapes.tiles)


def move_word(key: Key, tile: Scalar) -> Scalar:
    """The word of all parameters by which `tile` is moved."""
    return _hash.bits(tile, key.first_move, key.second_move)


def move(shapes: Tiling, word: Scalar) -> Move:
    """The parameters in a word: the bits of each are its own, but for those of `factor`."""
    return Move(
        plane=(word >> 3) & jnp.uint32(shapes.planes - 1),
        sublane=word & 7,
        lane=(word >> 8) & 127,
        per_sublane=(word >> 15) & 127,
        factor=word | 7,
    )


def lane_shift(moved: Move, sublane: Scalar) -> Scalar:
    """By how many lanes a sublane of the array is rolled, modulo 128."""
    return moved.lane + moved.per_sublane * (sublane // ROLLED_TOGETHER)


def lane_word(lane: Scalar) -> Scalar:
    """The word of a lane of the table, the same in all sketches."""
    return _hash.mix(lane + 1)


def turn(moved: Move, lane_word: Scalar) -> Scalar:
    """By how many sublanes a lane turns, in the highest three bits."""
    return lane_word * moved.factor + (moved.sublane << 29)


def sign_group(shapes: Tiling, tile: Scalar, plane: Scalar) -> Scalar:
    """The four planes of the array among which is `plane` of `tile`."""
    return (tile * jnp.uint32(shapes.planes) + plane) >> 2


def sign_words(key: Key, group: Scalar, lane: Scalar) -> Scalar:
    """Words of the signs of one lane in four planes."""
    return _hash.bits(group * jnp.uint32(LANES) + lane, key.first_sign, key.second_sign)


def sign_word(shapes: Tiling, key: Key, tile: Scalar, plane: Scalar, lane: Scalar) -> Scalar:
    """A word of the signs of one lane in four planes, among which is `plane` of `tile`."""
    return sign_words(key, sign_group(shapes, tile, plane), lane)


def first_bit(shapes: Tiling, tile: Scalar, plane: Scalar) -> Scalar:
    """The bit of a word of signs that is the sign of the first sublane of `plane`."""
    if shapes.planes < SIGNED_TOGETHER:  # Else a tile begins with a word.
        plane = tile * jnp.uint32(shapes.planes) + plane
    return (plane & (SIGNED_TOGETHER - 1)) * SUBLANES


def signed(x: Scalar, word: Scalar, bit: Scalar) -> Scalar:
    """`-x` if `bit` of the word of signs is set, else `x`."""
    sign = (word << (31 - bit)) & jnp.uint32(1 << 31)
    if x.dtype == jnp.float32:
        words = lax.bitcast_convert_type(x, jnp.uint32) ^ sign
        return lax.bitcast_convert_type(words, jnp.float32)
    return jnp.where(sign != 0, -x, x)


def total(parts: jax.Array) -> jax.Array:
    """The sum over the first axis: the second half is added to the first, until one is left."""
    while (count := parts.shape[0]) > 1:
        half = count // 2
        added = parts[:half] + parts[count - half :]
        parts = jnp.concatenate([added, parts[half : count - half]]) if count % 2 else added
    return parts[0]
