"""The definition of `encode` and `decode` by tiles, in plain JAX."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _vma
from pallas_kernels.count_sketch import tiling
from pallas_kernels.count_sketch.estimate import ESTIMATES
from pallas_kernels.count_sketch.tiling import (
    LANES,
    PLANE,
    SIGNED_TOGETHER,
    STEP,
    SUBLANES,
    Key,
    Tiling,
)


def accumulator(dtype: jax.typing.DTypeLike) -> Any:
    """The dtype of a table of sums of `dtype`."""
    return jnp.dtype(jnp.int32 if dtype == jnp.int32 else jnp.float32)


def _within(shapes: Tiling, tile: jax.Array) -> tuple[jax.Array, ...]:
    """The plane, sublane and lane of each element of these tiles, uint32 of a shape each."""
    shape = (*tile.shape, shapes.planes, SUBLANES, LANES)
    return tuple(lax.broadcasted_iota(jnp.uint32, shape, tile.ndim + axis) for axis in range(3))


def _rolled(
    shapes: Tiling, key: Key, tile: jax.Array, back: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The source plane, sublane and lane of each element of a rolled tile.

    With `back`, the roll is undone. `tile` has the shape of the leading axes of the result.
    """
    sources = []
    for index, roll, length in zip(
        _within(shapes, tile),
        lax.optimization_barrier(tiling.rolls(shapes, key, tile)),
        (shapes.planes, SUBLANES, LANES),
        strict=True,
    ):
        roll = roll[..., None, None, None]
        sources.append((index + roll if back else index - roll) & (length - 1))
    return sources[0], sources[1], sources[2]


def _sign_words(shapes: Tiling, key: Key, tile: jax.Array) -> jax.Array:
    """The words of signs of each of these tiles, uint32[..., groups of planes, lanes]."""
    shape = (*tile.shape, max(1, shapes.planes // SIGNED_TOGETHER), LANES)
    group, lane = (lax.broadcasted_iota(jnp.uint32, shape, tile.ndim + axis) for axis in (0, 1))
    wide = Key(*(field[..., None, None] if field.ndim else field for field in key))
    plane = group * jnp.uint32(SIGNED_TOGETHER)
    return tiling.sign_word(shapes, wide, tile[..., None, None], plane, lane)


def encode(
    x: jax.Array,
    seeds: jax.Array,
    *,
    rows: int,
    columns: int,
    planes: int | None = None,
    step: int = STEP,
) -> jax.Array:
    """The table of `x`. Each step of a loop adds one tile to all slots of all parts.

    Its temporaries have the size of the partial tables. `planes` and `step` are for tests of small
    arrays.
    """
    shapes = tiling.tiling(x.size, columns, planes, step)
    x_flat = jnp.pad(x.ravel(), (0, shapes.tiles * shapes.planes * PLANE - x.size))
    x_tiles = x_flat.reshape(shapes.tiles, shapes.planes, SUBLANES, LANES)
    each = lax.broadcasted_iota
    shape = (shapes.parts, rows, shapes.slots)
    part, slot = each(jnp.uint32, shape, 0), each(jnp.uint32, shape, 2)
    fields = tiling.keys(seeds, rows)
    key = Key(*(fields[None, :, i, None] for i in range(len(Key._fields))))
    dtype = accumulator(x.dtype)

    def add_round(index: jax.Array, table: jax.Array) -> jax.Array:
        dealt = tiling.tile_at(shapes, key, slot, part * jnp.uint32(shapes.part) + index)
        tile, holds = lax.optimization_barrier(dealt)  # Else computed again for every element.
        plane, sublane, lane = _rolled(shapes, key, tile, back=False)
        tile, holds = tile[..., None, None, None], holds[..., None, None, None]
        source = jnp.where(holds, tile, 0), plane, sublane, lane
        values = x_tiles[tuple(i.astype(jnp.int32) for i in source)].astype(dtype)
        wide = Key(*(field[..., None, None, None] for field in key))
        word = tiling.sign_word(shapes, wide, tile, plane & ~jnp.uint32(SIGNED_TOGETHER - 1), lane)
        bit = tiling.first_bit(shapes, tile, plane) + sublane
        return table + jnp.where(holds, tiling.signed(values, word, bit), 0)

    shape_of_table = (*shape, shapes.planes, SUBLANES, LANES)
    table, *_ = _vma.equally_varying(jnp.zeros(shape_of_table, dtype), x, seeds)
    table = lax.fori_loop(jnp.uint32(0), jnp.uint32(shapes.part), add_round, table)
    return tiling.total(table).reshape(rows, columns)


def decode(
    table: jax.Array,
    seeds: jax.Array,
    *,
    shape: tuple[int, ...],
    estimate: str,
    planes: int | None = None,
) -> jax.Array:
    """The estimates of an array of `shape`."""
    rows, columns = table.shape
    size = math.prod(shape)
    shapes = tiling.tiling(size, columns, planes)
    tiles = table.reshape(rows, shapes.slots, shapes.planes, SUBLANES, LANES)
    tile = jnp.arange(shapes.tiles, dtype=jnp.uint32)
    keys = tiling.keys(seeds, rows)
    plane, sublane, _ = _within(shapes, tile)
    bit = tiling.first_bit(shapes, tile[:, None, None, None], plane) + sublane
    values = []
    for row in range(rows):
        key = Key(*keys[row])
        slot = tiling.slot_of(shapes, key, tile)[:, None, None, None]
        source = slot, *_rolled(shapes, key, tile, back=True)
        # Without the barrier XLA would compute them again for every element.
        words = lax.optimization_barrier(_sign_words(shapes, key, tile))
        word = jnp.repeat(words, shapes.planes // words.shape[1], axis=1)[:, :, None]
        value = tiles[row][tuple(i.astype(jnp.int32) for i in source)]
        values.append(tiling.signed(value, word, bit))
    return ESTIMATES[estimate](values).ravel()[:size].reshape(shape)
