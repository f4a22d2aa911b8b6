"""The definition of `encode` and `decode` by tiles, in plain JAX."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _vma
from pallas_kernels.count_sketch import tiling
from pallas_kernels.count_sketch.estimate import ESTIMATES
from pallas_kernels.count_sketch.tiling import LANES, PLANE, SUBLANES, Key, Tiling


def accumulator(dtype: jax.typing.DTypeLike) -> Any:
    """The dtype of a table of sums of `dtype`."""
    return jnp.dtype(jnp.int32 if dtype == jnp.int32 else jnp.float32)


def _axes(keys: jax.Array) -> Key:
    """The keys of all rows, each field [rows, 1]."""
    return Key(*(keys[:, i : i + 1] for i in range(keys.shape[1])))


def _rolled(
    shapes: Tiling, key: Key, tile: jax.Array, back: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The source plane, sublane and lane of each element of a rolled tile.

    With `back`, the roll is undone. `tile` has the shape of the leading axes of the result.
    """
    shape = (*tile.shape, shapes.planes, SUBLANES, LANES)
    sources = []
    for axis, roll in enumerate(tiling.rolls(shapes, key, tile)):
        index = lax.broadcasted_iota(jnp.uint32, shape, tile.ndim + axis)
        roll = roll[..., None, None, None]
        sources.append((index + roll if back else index - roll) & (shape[tile.ndim + axis] - 1))
    return sources[0], sources[1], sources[2]


def _within(leading: int) -> jax.Array:
    """The position of each element in its plane, uint32[1, ..., 8, 128] with `leading` ones."""
    return jnp.arange(PLANE, dtype=jnp.uint32).reshape(*(1,) * leading, SUBLANES, LANES)


def encode(
    x: jax.Array, seeds: jax.Array, *, rows: int, columns: int, planes: int | None = None
) -> jax.Array:
    """The table of `x`. Each step of a loop adds the tiles at one place of all slots.

    Its temporaries have the size of the table. `planes` is for tests of small arrays.
    """
    shapes = tiling.tiling(x.size, columns, planes)
    tile_size = shapes.planes * PLANE
    x_flat = jnp.pad(x.ravel(), (0, shapes.tiles * tile_size - x.size))
    x_tiles = x_flat.reshape(shapes.tiles, shapes.planes, SUBLANES, LANES)
    slot = jnp.arange(shapes.slots, dtype=jnp.uint32)[None]
    every_row, every_slot = jnp.ix_(jnp.arange(rows), jnp.arange(shapes.slots))
    every_row, every_slot = every_row[..., None, None, None], every_slot[..., None, None, None]
    key = _axes(tiling.keys(seeds, rows))
    dtype = accumulator(x.dtype)

    def add_place(index: jax.Array, table: jax.Array) -> jax.Array:
        tile, holds = tiling.tile_at(shapes, key, slot, index)
        plane, sublane, lane = _rolled(shapes, key, tile, back=False)
        tile, holds = tile[..., None, None, None], holds[..., None, None, None]
        source = jnp.where(holds, tile, 0), plane, sublane, lane
        values = x_tiles[tuple(i.astype(jnp.int32) for i in source)]
        words = tiling.sign_word(
            shapes, Key(*(k[..., None, None, None] for k in key)), tile, _within(3)
        )
        word = words[every_row, every_slot, 0, sublane.astype(jnp.int32), lane.astype(jnp.int32)]
        plane = tile * jnp.uint32(shapes.planes) + plane
        return table + jnp.where(holds, tiling.signed(values.astype(dtype), word, plane), 0)

    shape = (rows, shapes.slots, shapes.planes, SUBLANES, LANES)
    table, *_ = _vma.equally_varying(jnp.zeros(shape, dtype), x, seeds)
    table = lax.fori_loop(jnp.uint32(0), jnp.uint32(shapes.longest), add_place, table)
    return table.reshape(rows, columns)


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
    axes = (shapes.tiles, shapes.planes, SUBLANES, LANES)
    plane = tile[:, None, None, None] * jnp.uint32(shapes.planes)
    plane = plane + lax.broadcasted_iota(jnp.uint32, axes, 1)
    values = []
    for row in range(rows):
        key = Key(*keys[row])
        slot = tiling.slot_of(shapes, key, tile)[:, None, None, None]
        source = slot, *_rolled(shapes, key, tile, back=True)
        word = tiling.sign_word(shapes, key, tile[:, None, None, None], _within(2))
        # Without the barrier XLA would compute it again for every plane.
        word = lax.optimization_barrier(word)
        value = tiles[row][tuple(i.astype(jnp.int32) for i in source)]
        values.append(tiling.signed(value, word, plane))
    return ESTIMATES[estimate](values).ravel()[:size].reshape(shape)
