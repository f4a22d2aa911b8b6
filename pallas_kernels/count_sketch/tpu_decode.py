"""`decode` by tiles as Pallas kernels for TPU: several tiles per step if the table fits in VMEM.

Else a step decodes one tile, and its index maps find the slot of the tile in each row.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _vma
from pallas_kernels.count_sketch import tiling
from pallas_kernels.count_sketch.reference import ESTIMATES
from pallas_kernels.count_sketch.tiling import (
    LANES,
    SIGNED_TOGETHER,
    STEP,
    SUBLANES,
    Key,
    Move,
    Tiling,
)
from pallas_kernels.count_sketch.tpu_tiles import (
    Blocks,
    at_lanes,
    fits,
    iota,
    key_of,
    tables,
    turned,
)


def _decoded(
    shapes: Tiling,
    estimate: str,
    keys: list[Key],
    moves: list[Move],
    tile: Any,
    table: Any,
    words_ref: Any,
) -> Iterator[jax.Array]:
    """The estimates of each plane of a tile; `table(row, plane)` is a plane at its place."""
    lane_word = tiling.lane_word(iota(1))
    turns = [tiling.turn(moved, lane_word) for moved in moves]
    lanes = [(iota(1) + tiling.lane_shift(moved, iota(0))) & (LANES - 1) for moved in moves]
    begin = tiling.sign_group(shapes, tile, jnp.uint32(0))
    for row, key in enumerate(keys):
        words_ref[row] = tiling.sign_words(key, begin + iota(0), iota(1))
    before = jnp.uint32(0)  # Planes that the first word has before the tile.
    if shapes.planes % SIGNED_TOGETHER:
        before = tile * jnp.uint32(shapes.planes) & (SIGNED_TOGETHER - 1)
    for plane in range(shapes.planes):
        values = []
        for row, moved in enumerate(moves):
            to = (jnp.uint32(plane) + moved.plane) & jnp.uint32(shapes.planes - 1)
            at = to + before
            word = words_ref[row, pl.ds((at >> 2).astype(jnp.int32), 1)]
            bit = (at & (SIGNED_TOGETHER - 1)) * SUBLANES + iota(0)
            value = tiling.signed(table(row, to.astype(jnp.int32)), word, bit)
            values.append(at_lanes(turned(value, turns[row], back=True), lanes[row]))
        yield ESTIMATES[estimate](values)


def _decode_kernel(
    keys_ref: Any,
    tiles_ref: Any,
    table_ref: Any,
    out_ref: Any,
    words_ref: Any,
    *,
    shapes: Tiling,
    blocks: Blocks,
    estimate: str,
) -> None:
    """Decodes the tiles of a step, with the whole table in VMEM."""
    first = pl.program_id(0) * blocks.tiles
    keys = [key_of(keys_ref, row) for row in range(blocks.rows)]

    def decode_tile(index: Any, carry: None) -> None:
        at = [2 * (row * blocks.tiles + index) for row in range(blocks.rows)]
        slots = [tiles_ref[0, place].astype(jnp.int32) for place in at]
        moves = [tiling.move(shapes, tiles_ref[0, place + 1]) for place in at]
        tile = (first + index).astype(jnp.uint32)
        table = lambda row, plane: table_ref[row, slots[row], plane]  # noqa: E731
        planes = _decoded(shapes, estimate, keys, moves, tile, table, words_ref)
        for plane, value in enumerate(planes):
            out_ref[index * shapes.planes + plane] = value

    lax.fori_loop(0, jnp.clip(shapes.tiles - first, 0, blocks.tiles), decode_tile, None)


def _decode_large_kernel(keys_ref: Any, *refs: Any, shapes: Tiling, estimate: str) -> None:
    """Decodes one tile, of which the slot in each row is in VMEM."""
    *table_refs, out_ref, words_ref = refs
    tile = pl.program_id(0).astype(jnp.uint32)
    keys = [key_of(keys_ref, row) for row in range(len(table_refs))]
    moves = [tiling.move(shapes, tiling.move_word(key, tile)) for key in keys]
    table = lambda row, plane: table_refs[row][0, 0, plane]  # noqa: E731
    planes = _decoded(shapes, estimate, keys, moves, tile, table, words_ref)
    for plane, value in enumerate(planes):
        out_ref[plane] = value


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
    block = shapes.planes, SUBLANES, LANES
    keys = tiling.keys(seeds, rows)
    tiles = table.reshape(rows, shapes.slots, *block)
    if fits(rows, columns):
        most = max(1, STEP // shapes.planes)
        blocks = Blocks(rows, shapes.slots, min(most, shapes.tiles), 1)
        steps = pl.cdiv(shapes.tiles, blocks.tiles)
        words = tables(shapes, blocks, steps, keys)
        kernel = functools.partial(_decode_kernel, shapes=shapes, blocks=blocks, estimate=estimate)
        per_step = pl.BlockSpec(
            (None, None, 1, words.shape[-1]),
            lambda step, keys_ref: (0, step, 0, 0),
            memory_space=pltpu.SMEM,
        )
        whole = pl.BlockSpec(tiles.shape, lambda step, keys_ref: (0, 0, 0, 0, 0))
        in_specs, height = [per_step, whole], blocks.tiles * shapes.planes
        operands: tuple[jax.Array, ...] = words, tiles
    else:
        kernel = functools.partial(_decode_large_kernel, shapes=shapes, estimate=estimate)
        steps, height = shapes.tiles, shapes.planes
        in_specs = [_block_of_row(shapes, row) for row in range(rows)]
        operands = (tiles,) * rows
    keys, *varying = _vma.equally_varying(keys, *operands)
    dtype = table.dtype if estimate == "median" else jnp.float32
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps,),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((height, SUBLANES, LANES), lambda step, keys_ref: (step, 0, 0)),
            scratch_shapes=[pltpu.VMEM((rows, SUBLANES, LANES), jnp.uint32)],
        ),
        out_shape=_vma.like(keys, (max(shapes.total_planes, height), SUBLANES, LANES), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
    )(keys, *varying)
    return out.ravel()[:size].reshape(shape)


def _block_of_row(shapes: Tiling, row: int) -> Any:
    """The slot of a tile in a row."""

    def index_map(tile: Any, keys_ref: Any) -> tuple[Any, ...]:
        slot = tiling.slot_of(shapes, key_of(keys_ref, row), tile.astype(jnp.uint32))
        return row, slot.astype(jnp.int32), 0, 0, 0

    return pl.BlockSpec((1, 1, shapes.planes, SUBLANES, LANES), index_map)
