"""`encode` and `decode` by tiles as Pallas kernels for TPU: one tile per step.

The keys of the rows determine which block of the array, or of the table, a step reads. They are
available before the kernel starts (scalar prefetch), so no table of places is needed.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _vma
from pallas_kernels.count_sketch import tiling
from pallas_kernels.count_sketch.estimate import ESTIMATES
from pallas_kernels.count_sketch.reference import accumulator
from pallas_kernels.count_sketch.tiling import LANES, PLANE, SUBLANES, Key, Tiling


def _key(keys_ref: Any, row: Any) -> Key:
    return Key(*(keys_ref[row, i] for i in range(len(Key._fields))))


def _within() -> jax.Array:
    """The position of each element in its plane."""
    sublane = lax.broadcasted_iota(jnp.uint32, (SUBLANES, LANES), 0)
    return sublane * LANES + lax.broadcasted_iota(jnp.uint32, (SUBLANES, LANES), 1)


def _roll(plane: jax.Array, sublane: jax.Array, lane: jax.Array) -> jax.Array:
    plane = pltpu.roll(plane, sublane.astype(jnp.int32), 0)
    return pltpu.roll(plane, lane.astype(jnp.int32), 1)


def _encode_kernel(keys_ref: Any, x_ref: Any, table_ref: Any, *, shapes: Tiling) -> None:
    key = _key(keys_ref, pl.program_id(0))
    slot, index = (pl.program_id(axis).astype(jnp.uint32) for axis in (1, 2))
    tile, holds = tiling.tile_at(shapes, key, slot, index)

    @pl.when(index == 0)
    def clear() -> None:
        table_ref[...] = jnp.zeros_like(table_ref)

    @pl.when(holds)
    def add() -> None:
        plane_roll, sublane_roll, lane_roll = tiling.rolls(shapes, key, tile)
        word = tiling.sign_word(shapes, key, tile, _within())
        for plane in range(shapes.planes):
            source = (jnp.uint32(plane) - plane_roll) & jnp.uint32(shapes.planes - 1)
            position = tile * jnp.uint32(shapes.planes) + source
            values = tiling.signed(x_ref[source.astype(jnp.int32)], word, position)
            # The last tile may extend past the array, where values are undefined.
            values = jnp.where(position < jnp.uint32(shapes.total_planes), values, 0)
            table_ref[0, 0, plane] += _roll(values, sublane_roll, lane_roll)


def encode(
    x: jax.Array,
    seeds: jax.Array,
    *,
    rows: int,
    columns: int,
    planes: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `reference.encode`."""
    shapes = tiling.tiling(x.size, columns, planes)
    height = max(shapes.total_planes, shapes.planes)
    dtype = accumulator(x.dtype)
    x_planes = jnp.pad(x.ravel().astype(dtype), (0, height * PLANE - x.size))
    x_planes, keys = _vma.equally_varying(
        x_planes.reshape(height, SUBLANES, LANES), tiling.keys(seeds, rows)
    )

    def block_of_x(row: Any, slot: Any, index: Any, keys_ref: Any) -> tuple[Any, int, int]:
        place = slot.astype(jnp.uint32), index.astype(jnp.uint32)
        tile, holds = tiling.tile_at(shapes, _key(keys_ref, row), *place)
        return jnp.where(holds, tile.astype(jnp.int32), 0), 0, 0

    block = shapes.planes, SUBLANES, LANES
    table = pl.pallas_call(
        functools.partial(_encode_kernel, shapes=shapes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, shapes.slots, shapes.longest),
            in_specs=[pl.BlockSpec(block, block_of_x)],
            out_specs=pl.BlockSpec(
                (1, 1, *block), lambda row, slot, index, keys_ref: (row, slot, 0, 0, 0)
            ),
        ),
        out_shape=_vma.like(x_planes, (rows, shapes.slots, *block), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
    )(keys, x_planes)
    return table.reshape(rows, columns)


def _decode_kernel(keys_ref: Any, *refs: Any, shapes: Tiling, estimate: str) -> None:
    *table_refs, out_ref = refs
    tile = pl.program_id(0).astype(jnp.uint32)
    every_key = [_key(keys_ref, row) for row in range(len(table_refs))]
    words = [tiling.sign_word(shapes, key, tile, _within()) for key in every_key]
    rolls = [tiling.rolls(shapes, key, tile) for key in every_key]
    for plane in range(shapes.planes):
        position = tile * jnp.uint32(shapes.planes) + jnp.uint32(plane)
        values = []
        for table_ref, word, (plane_roll, sublane_roll, lane_roll) in zip(
            table_refs, words, rolls, strict=True
        ):
            source = (jnp.uint32(plane) + plane_roll) & jnp.uint32(shapes.planes - 1)
            back = (SUBLANES - sublane_roll) & 7, (LANES - lane_roll) & 127
            value = _roll(table_ref[0, 0, source.astype(jnp.int32)], *back)
            values.append(tiling.signed(value, word, position))
        out_ref[plane] = ESTIMATES[estimate](values)


def decode(
    table: jax.Array,
    seeds: jax.Array,
    *,
    shape: tuple[int, ...],
    estimate: str,
    planes: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `reference.decode`."""
    rows, columns = table.shape
    size = math.prod(shape)
    shapes = tiling.tiling(size, columns, planes)
    height = max(shapes.total_planes, shapes.planes)
    block = shapes.planes, SUBLANES, LANES
    table, keys = _vma.equally_varying(table, tiling.keys(seeds, rows))

    def block_of_row(row: int) -> Any:
        def index_map(tile: Any, keys_ref: Any) -> tuple[Any, ...]:
            slot = tiling.slot_of(shapes, _key(keys_ref, row), tile.astype(jnp.uint32))
            return row, slot.astype(jnp.int32), 0, 0, 0

        return pl.BlockSpec((1, 1, *block), index_map)

    dtype = table.dtype if estimate == "median" else jnp.float32
    tiles = table.reshape(rows, shapes.slots, *block)
    out = pl.pallas_call(
        functools.partial(_decode_kernel, shapes=shapes, estimate=estimate),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(shapes.tiles,),
            in_specs=[block_of_row(row) for row in range(rows)],
            out_specs=pl.BlockSpec(block, lambda tile, keys_ref: (tile, 0, 0)),
        ),
        out_shape=_vma.like(table, (height, SUBLANES, LANES), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
    )(keys, *[tiles] * rows)
    return out.ravel()[:size].reshape(shape)
