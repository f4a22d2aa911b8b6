"""The definition of `encode` and `decode` by tiles, in plain JAX."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _vma
from pallas_kernels.count_sketch import tiling
from pallas_kernels.count_sketch.tiling import (
    LANES,
    PLANE,
    SIGNED_TOGETHER,
    STEP,
    SUBLANES,
    Key,
    Move,
    Tiling,
)


def total(values: Sequence[jax.Array]) -> jax.Array:
    """The sum over rows, in their order, float32."""
    result = values[0].astype(jnp.float32)
    for value in values[1:]:
        result = result + value.astype(jnp.float32)
    return result


def mean(values: Sequence[jax.Array]) -> jax.Array:
    """The mean over rows, float32.

    It uses a multiplication, because backends round a quotient differently.
    """
    return total(values) * jnp.float32(1 / len(values))


def median(values: Sequence[jax.Array]) -> jax.Array:
    """The median over rows, of their dtype; the midpoint of the middle two for an even number.

    Neighbors are exchanged (minimum to the left, maximum to the right), in as many rounds as rows.
    One NaN makes the median NaN. A midpoint of int32 is rounded down.
    """
    rows = list(values)
    for round_ in range(len(rows)):
        for i in range(round_ % 2, len(rows) - 1, 2):
            first, second = rows[i], rows[i + 1]
            in_order = first <= second
            rows[i] = jnp.where(in_order, first, second)
            rows[i + 1] = jnp.where(in_order, second, first)
    middle = rows[len(rows) // 2]
    if len(rows) % 2 == 0:
        below = rows[len(rows) // 2 - 1]
        if jnp.issubdtype(middle.dtype, jnp.integer):
            middle = (below & middle) + ((below ^ middle) >> 1)
        else:
            middle = (below + middle) * jnp.float32(0.5)
    if jnp.issubdtype(middle.dtype, jnp.floating):
        # Comparisons with NaN are false, so the exchanges may lose a NaN.
        for value in values:
            middle = jnp.where(value == value, middle, jnp.nan)
    return middle


ESTIMATES = {"mean": mean, "median": median, "sum": total}
"""How the estimates of the rows are combined, by name."""


def accumulator(dtype: jax.typing.DTypeLike) -> Any:
    """The dtype of a table of sums of `dtype`."""
    return jnp.dtype(jnp.int32 if dtype == jnp.int32 else jnp.float32)


def _within(shapes: Tiling, tile: jax.Array) -> tuple[jax.Array, ...]:
    """The plane, sublane and lane of each element of these tiles, uint32 of a shape each."""
    shape = (*tile.shape, shapes.planes, SUBLANES, LANES)
    return tuple(lax.broadcasted_iota(jnp.uint32, shape, tile.ndim + axis) for axis in range(3))


def _wide(field: jax.Array, axes: int) -> jax.Array:
    """The field with so many axes of length one at its end."""
    return field.reshape(*field.shape, *(1,) * axes)


def _turns(moved: Move) -> jax.Array:
    """By how many sublanes each lane of these tiles turns, uint32[..., lanes]."""
    axes = moved.lane.ndim
    lane = lax.broadcasted_iota(jnp.uint32, (*(1,) * axes, LANES), axes)
    return tiling.turn(Move(*(_wide(field, 1) for field in moved)), tiling.lane_word(lane)) >> 29


def _sign_words(shapes: Tiling, key: Key, tile: jax.Array) -> jax.Array:
    """The words of signs of each of these tiles, uint32[..., planes, 1, lanes]."""
    groups = max(1, shapes.planes // SIGNED_TOGETHER)
    shape = (*tile.shape, groups, LANES)
    group, lane = (lax.broadcasted_iota(jnp.uint32, shape, tile.ndim + axis) for axis in (0, 1))
    wide = Key(*(_wide(field, 2) if field.ndim else field for field in key))
    plane = group * jnp.uint32(SIGNED_TOGETHER)
    words = tiling.sign_word(shapes, wide, _wide(tile, 2), plane, lane)
    # Without the barrier XLA would compute them again for every element.
    words = lax.optimization_barrier(words)
    return jnp.repeat(words, shapes.planes // groups, axis=-2)[..., None, :]


def _signed(shapes: Tiling, key: Key, tile: jax.Array, values: jax.Array) -> jax.Array:
    """These tiles at their places in the table, with their signs."""
    plane, sublane, _ = _within(shapes, tile)
    bit = tiling.first_bit(shapes, _wide(tile, 3), plane) + sublane
    return tiling.signed(values, _sign_words(shapes, key, tile), bit)


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
        moved = tiling.move(shapes, lax.optimization_barrier(tiling.move_word(key, tile)))
        turns = lax.optimization_barrier(_turns(moved))[..., None, None, :]
        moved = Move(*(_wide(field, 3) for field in moved))
        plane, sublane, lane = _within(shapes, tile)
        sublane = (sublane - turns) & 7
        shift = tiling.lane_shift(moved, sublane)
        plane = (plane - moved.plane) & jnp.uint32(shapes.planes - 1)
        source = jnp.where(_wide(holds, 3), _wide(tile, 3), 0), plane, sublane, (lane - shift) & 127
        values = x_tiles[tuple(i.astype(jnp.int32) for i in source)].astype(dtype)
        return table + jnp.where(_wide(holds, 3), _signed(shapes, key, tile, values), 0)

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
    plane, sublane, lane = _within(shapes, tile)
    values = []
    for row in range(rows):
        key = Key(*keys[row])
        moved = tiling.move(shapes, lax.optimization_barrier(tiling.move_word(key, tile)))
        turns = lax.optimization_barrier(_turns(moved))[:, None, None]
        moved = Move(*(_wide(field, 3) for field in moved))
        placed = tiles[row][tiling.slot_of(shapes, key, tile).astype(jnp.int32)]
        placed = _signed(shapes, key, tile, placed)
        turned = jnp.take_along_axis(placed, ((sublane + turns) & 7).astype(jnp.int32), axis=2)
        to_plane = (plane + moved.plane) & jnp.uint32(shapes.planes - 1)
        to_lane = (lane + tiling.lane_shift(moved, sublane)) & 127
        place = tile[:, None, None, None], to_plane, sublane, to_lane
        values.append(turned[tuple(i.astype(jnp.int32) for i in place)])
    return ESTIMATES[estimate](values).ravel()[:size].reshape(shape)
