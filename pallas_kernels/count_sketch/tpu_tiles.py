"""What both kernels of the sketch for TPU share: moves of a plane, blocks, and tables of tiles."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._configs import Config as _Config
from pallas_kernels._configs import require_field
from pallas_kernels.count_sketch import tiling
from pallas_kernels.count_sketch.tiling import (
    LANES,
    PLANE,
    SIGNED_TOGETHER,
    SUBLANES,
    Key,
    Tiling,
)


@dataclasses.dataclass(frozen=True)
class Config(_Config):
    """Of `encode`."""

    rows: int = 8  # The most in VMEM at once, 1 to 16: the kernel is unrolled over them.
    cells: int = 3 * 2**19  # The most in VMEM at once, in two buffers of 6 MiB: a v4 has 16 MiB.
    unrolled: int = 64  # Planes of a row, per iteration of the loop, 8 to 128.

    def __post_init__(self) -> None:
        require_field("rows", self.rows, range(1, 17), "in 1 to 16")
        allowed = range(PLANE, 2**21 + 1, PLANE)
        require_field("cells", self.cells, allowed, "a multiple of 1024, at most 2**21")
        require_field("unrolled", self.unrolled, range(8, 129), "in 8 to 128")

    @classmethod
    def candidates(cls, dtype: jax.typing.DTypeLike) -> tuple["Config", ...]:
        """Fewer rows read the array more often, and leave more space."""
        return cls(), cls(unrolled=32), cls(unrolled=128), cls(rows=1), cls(cells=3 * 2**18)


def key_of(keys_ref: Any, row: Any) -> Key:
    return Key(*(keys_ref[row, i] for i in range(len(Key._fields))))


def iota(axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.uint32, (SUBLANES, LANES), axis)


def turned(plane: jax.Array, turns: jax.Array, back: bool = False) -> jax.Array:
    """A plane, of which each lane is turned by its own number of sublanes, or turned back."""
    for bit in range(3):
        rolled = pltpu.roll(plane, SUBLANES - (1 << bit) if back else 1 << bit, 0)
        plane = jnp.where((turns >> (29 + bit)) & 1 != 0, rolled, plane)
    return plane


def at_lanes(plane: jax.Array, lanes: jax.Array) -> jax.Array:
    """The elements of a plane at these lanes of each sublane, all within [0, 128).

    NumPy's functions would also allow for negative ones, which takes three instructions.
    """
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        operand_batching_dims=(0,),
        start_indices_batching_dims=(0,),
    )
    return lax.gather(
        plane,
        lanes.astype(jnp.int32)[..., None],
        numbers,
        slice_sizes=(1, 1),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


def fits(rows: int, columns: int) -> bool:
    """Whether all rows of the table fit in VMEM."""
    return rows * columns <= Config().cells


class Blocks(NamedTuple):
    """How much of the table and of the array a step of `encode` has in VMEM."""

    rows: int
    slots: int
    tiles: int
    together: int  # Tiles that the loop adds at once.

    @staticmethod
    def of(shapes: Tiling, rows: int, step: int, config: Config) -> "Blocks":
        """As many rows as fit, or some slots of one row; tiles that divide those of a part."""
        cells = shapes.planes * PLANE
        most = max(1, min(config.rows, config.cells // (shapes.slots * cells)))
        together = max(number for number in range(1, most + 1) if rows % number == 0)
        slots = min(shapes.slots, max(1, config.cells // cells))
        most = max(1, step // shapes.planes)
        if shapes.slots <= most:
            tiles = most // shapes.slots * shapes.slots
        elif shapes.parts == 1:
            tiles = most
        else:
            tiles = _largest_divisor(shapes.part * shapes.slots, most)
        unrolled = config.unrolled // (1 if shapes.planes >= SIGNED_TOGETHER else 2)
        at_once = _largest_divisor(tiles, max(1, unrolled // shapes.planes))
        return Blocks(together, slots, tiles, at_once if slots == shapes.slots else 1)

    def steps(self, shapes: Tiling) -> int:
        """Steps per part."""
        return pl.cdiv(shapes.part * shapes.slots, self.tiles)


def _largest_divisor(number: int, most: int) -> int:
    return max(divisor for divisor in range(1, most + 1) if number % divisor == 0)


def tables(shapes: Tiling, blocks: Blocks, steps: int, keys: jax.Array) -> jax.Array:
    """The slot of each tile in each row, and the word that moves it, of each step."""
    shape = (keys.shape[0] // blocks.rows, steps, blocks.rows, blocks.tiles)
    tile = lax.broadcasted_iota(jnp.uint32, shape, 1) * jnp.uint32(blocks.tiles)
    tile += lax.broadcasted_iota(jnp.uint32, shape, 3)
    fields = keys.reshape(shape[0], 1, blocks.rows, 1, -1)
    key = Key(*(fields[..., i] for i in range(len(Key._fields))))
    pairs = jnp.stack([tiling.slot_of(shapes, key, tile), tiling.move_word(key, tile)], axis=-1)
    return pairs.reshape(*shape[:2], 1, -1)
