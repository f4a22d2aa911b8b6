"""`encode` and `decode` by tiles as Pallas kernels for TPU.

The kernel of `encode` keeps rows of the table in VMEM and reads the array once for them, in order,
several tiles per step, each for all rows. XLA computes the slots of the tiles and the words that
move them, so that the scalar unit does not hash.

Tiles of eight planes or more are copied first, plane by plane, to every ninth row. So one load with
that stride takes the same sublane of eight planes, which all are rolled by the same number of
lanes. Lanes are turned by selections among eight registers. The table in VMEM has this order too.
Lower tiles are moved plane by plane, by a permutation of the lanes of each sublane.

`decode` has several tiles per step if the table fits in VMEM. Else a step decodes one tile, and its
index maps find the slot of the tile in each row.
"""

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _vma
from pallas_kernels.count_sketch import tiling
from pallas_kernels.count_sketch.reference import ESTIMATES, accumulator
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
from pallas_kernels.count_sketch.tpu_tiles import (
    Blocks,
    Config,
    at_lanes,
    fits,
    iota,
    key_of,
    tables,
    turned,
)

PLANES_OF_WORDS = SIGNED_TOGETHER * SUBLANES  # That a register of them has.
PITCH = SUBLANES + 1  # Rows from a copied plane to the next: memory has a bank per sublane.


def _is_high(shapes: Tiling) -> bool:
    """Whether tiles have planes enough to fill registers with one sublane of each."""
    return shapes.planes >= SUBLANES


def _words(shapes: Tiling, count: int) -> int:
    """Words of the signs of a lane in so many tiles, a multiple of eight."""
    planes = count * shapes.planes
    if planes % SIGNED_TOGETHER:  # They may begin within a word.
        planes += SIGNED_TOGETHER - 1
    return -(-planes // PLANES_OF_WORDS) * SUBLANES


def _rows_of_copy(shapes: Tiling) -> int:
    return (shapes.planes + SUBLANES) * PITCH


def _encode_kernel(
    keys_ref: Any,
    tiles_ref: Any,
    x_ref: Any,
    table_ref: Any,
    words_ref: Any,
    *copy_refs: Any,
    shapes: Tiling,
    blocks: Blocks,
) -> None:
    group, span, part, step = (pl.program_id(axis) for axis in range(4))
    first = (part * blocks.steps(shapes) + step) * blocks.tiles

    @pl.when(step == 0)
    def clear() -> None:
        table_ref[...] = jnp.zeros_like(table_ref)

    lane_word = tiling.lane_word(iota(1))

    def plane_at(index: Any, plane: Any, ends: bool) -> jax.Array:
        """A plane of a tile; if `ends`, zeros are beyond the end of the array."""
        at = index * shapes.planes + plane
        value: jax.Array = x_ref[at]
        if ends:
            value = jnp.where(first * shapes.planes + at < shapes.total_planes, value, 0)
        return value

    def dealt(row: int, index: Any) -> tuple[Any, Move]:
        """The slot of a tile in this span of a row, and how it is moved."""
        place = 2 * (row * blocks.tiles + index)
        slot = tiles_ref[0, place].astype(jnp.int32) - span * blocks.slots
        return slot, tiling.move(shapes, tiles_ref[0, place + 1])

    def low(row: int, index: Any, i: int, count: int, ends: bool) -> Iterator[Any]:
        """Where in the table each plane of a tile goes, and what is added there."""
        slot, moved = dealt(row, index + i)
        turns = tiling.turn(moved, lane_word)
        lanes = (iota(1) - tiling.lane_shift(moved, iota(0))) & (LANES - 1)
        for plane in range(shapes.planes):
            source = (jnp.uint32(plane) - moved.plane) & jnp.uint32(shapes.planes - 1)
            value = turned(
                at_lanes(plane_at(index + i, source.astype(jnp.int32), ends), lanes), turns
            )
            at: Any = i * shapes.planes + plane
            if count * shapes.planes % SIGNED_TOGETHER:  # Words begin before the tiles.
                at += (first + index) * shapes.planes & (SIGNED_TOGETHER - 1)
            word = words_ref[row, pl.ds(at >> 2, 1)]
            bit = jnp.uint32(at & (SIGNED_TOGETHER - 1)) * SUBLANES + iota(0)
            yield (row, slot, plane), tiling.signed(value, word, bit)

    def high(row: int, index: Any, i: int) -> Iterator[Any]:
        """The same eight planes at a time: what is yielded has one sublane of each."""
        slot, moved = dealt(row, index + i)
        turns = tiling.turn(moved, lane_word)
        shifts = [tiling.lane_shift(moved, jnp.uint32(2 * pair)) & (LANES - 1) for pair in range(4)]
        by = moved.plane.astype(jnp.int32)
        for begin in range(0, shapes.planes, SUBLANES):
            start = ((begin - by) & (shapes.planes - 1)) * PITCH
            values = [
                pltpu.roll(
                    copy_refs[i][pl.ds(start + sublane, SUBLANES, stride=PITCH)],
                    shifts[sublane // 2].astype(jnp.int32),
                    1,
                )
                for sublane in range(SUBLANES)
            ]
            for bit in range(3):
                here = (turns >> (29 + bit)) & 1 != 0
                values = [
                    jnp.where(here, values[(sublane - (1 << bit)) % SUBLANES], values[sublane])
                    for sublane in range(SUBLANES)
                ]
            at = (i * shapes.planes + begin) // SIGNED_TOGETHER
            first_word, second_word = (words_ref[row, pl.ds(at + k, 1)] for k in range(2))
            word = jnp.where(iota(0) < SIGNED_TOGETHER, first_word, second_word)
            word = word >> ((iota(0) & (SIGNED_TOGETHER - 1)) * SUBLANES)
            for sublane, value in enumerate(values):
                yield (row, slot, begin + sublane), tiling.signed(value, word, jnp.uint32(sublane))

    def copy(index: Any, i: int, ends: bool) -> None:
        """Copies a tile, and its first planes again, to rows from which strides can be read."""
        for plane in range(shapes.planes):
            value = plane_at(index + i, plane, ends)
            for at in range(plane, shapes.planes + SUBLANES - 1, shapes.planes):
                copy_refs[i][pl.ds(at * PITCH, SUBLANES)] = value

    def add_all(planes: Iterable[tuple[Any, jax.Array]]) -> None:
        for place, value in planes:
            table_ref[place] += value

    def add(index: Any, count: int, ends: bool) -> None:
        tile = (first + index).astype(jnp.uint32)
        group_of_words = tiling.sign_group(shapes, tile, jnp.uint32(0)) + iota(0)
        for row in range(blocks.rows):
            key = key_of(keys_ref, group * blocks.rows + row)
            for at in range(0, _words(shapes, count), SUBLANES):
                words = tiling.sign_words(key, group_of_words + jnp.uint32(at), iota(1))
                words_ref[row, pl.ds(at, SUBLANES)] = words
        for i in range(count if _is_high(shapes) else 0):
            copy(index, i, ends)
        for i in range(count):
            for row in range(blocks.rows):
                planes = (
                    high(row, index, i) if _is_high(shapes) else low(row, index, i, count, ends)
                )
                if blocks.slots == shapes.slots:
                    add_all(planes)
                    continue
                slot, _ = dealt(row, index + i)
                pl.when((slot >= 0) & (slot < blocks.slots))(functools.partial(add_all, planes))

    def loop(start: Any, stop: Any, count: int, ends: bool) -> None:
        lax.fori_loop(start, stop, lambda i, _: add(i * count, count, ends), None)

    # What is left is added tile by tile.
    whole, planes_left = divmod(shapes.total_planes, shapes.planes)
    full = jnp.clip(whole - first, 0, blocks.tiles) // blocks.together
    loop(0, full, blocks.together, False)
    if planes_left or whole % blocks.together:
        stop = jnp.clip(shapes.tiles - first, 0, blocks.tiles)
        loop(full * blocks.together, stop, 1, planes_left != 0)


def encode(
    x: jax.Array,
    seeds: jax.Array,
    *,
    rows: int,
    columns: int,
    planes: int | None = None,
    step: int = STEP,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `reference.encode`."""
    shapes = tiling.tiling(x.size, columns, planes, step)
    blocks = Blocks.of(shapes, rows, step, config or Config.of(x.dtype))
    spans = pl.cdiv(shapes.slots, blocks.slots)
    steps = blocks.steps(shapes)
    height = blocks.tiles * shapes.planes
    dtype = accumulator(x.dtype)
    keys = tiling.keys(seeds, rows)
    x_planes = jnp.pad(x.ravel().astype(dtype), (0, -x.size % PLANE))
    x_planes, keys, tiles = _vma.equally_varying(
        x_planes.reshape(-1, SUBLANES, LANES),
        keys,
        tables(shapes, blocks, shapes.parts * steps, keys),
    )
    last = pl.cdiv(shapes.total_planes, height) - 1  # The last part may have steps beyond it.
    tile = shapes.planes, SUBLANES, LANES
    table = pl.pallas_call(
        functools.partial(_encode_kernel, shapes=shapes, blocks=blocks),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows // blocks.rows, spans, shapes.parts, steps),
            in_specs=[
                pl.BlockSpec(
                    (None, None, 1, tiles.shape[-1]),
                    lambda group, span, part, step, keys_ref: (group, part * steps + step, 0, 0),
                    memory_space=pltpu.SMEM,
                ),
                pl.BlockSpec(
                    (height, SUBLANES, LANES),
                    lambda group, span, part, step, keys_ref: (
                        jnp.minimum(part * steps + step, last),
                        0,
                        0,
                    ),
                ),
            ],
            out_specs=pl.BlockSpec(
                (None, blocks.rows, blocks.slots, *tile),
                lambda group, span, part, step, keys_ref: (part, group, span, 0, 0, 0),
            ),
            scratch_shapes=[
                pltpu.VMEM((blocks.rows, _words(shapes, blocks.together), LANES), jnp.uint32),
                *[pltpu.VMEM((_rows_of_copy(shapes), LANES), dtype)] * blocks.together,
            ],
        ),
        out_shape=_vma.like(x_planes, (shapes.parts, rows, spans * blocks.slots, *tile), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
        ),
        interpret=interpret,
    )(keys, tiles, x_planes)
    table = tiling.total(table[:, :, : shapes.slots])  # The slots of the last span may be fewer.
    if _is_high(shapes):
        table = table.reshape(-1, SUBLANES, SUBLANES, LANES).swapaxes(1, 2)
    return table.reshape(rows, columns)


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
