"""`encode` and `decode` by tiles as Pallas kernels for TPU.

`encode` keeps rows of the table in VMEM and reads the array once for them, in order, several tiles
per step. `decode` reads one tile of each row per step. The keys of the rows determine which one,
and they are available before the kernel starts (scalar prefetch).
"""

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _vma
from pallas_kernels.count_sketch import tiling
from pallas_kernels.count_sketch.estimate import ESTIMATES
from pallas_kernels.count_sketch.reference import accumulator
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

MOST_ROWS = 8  # In VMEM at once: the kernel is unrolled over them.
MOST_CELLS = 3 * 2**19  # In VMEM at once, in two buffers of 6 MiB: a v4 has 16 MiB.
PITCH = SUBLANES + 1  # Rows from a copied plane to the next: memory has a bank per sublane.
ADDED_PLANES = 32  # Of a row, per iteration of the loop.


def _key(keys_ref: Any, row: Any) -> Key:
    return Key(*(keys_ref[row, i] for i in range(len(Key._fields))))


def _iota(axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.uint32, (SUBLANES, LANES), axis)


def _turned(plane: jax.Array, turns: jax.Array, back: bool = False) -> jax.Array:
    """A plane, of which each lane is turned by its own number of sublanes, or turned back."""
    for bit in range(3):
        rolled = pltpu.roll(plane, SUBLANES - (1 << bit) if back else 1 << bit, 0)
        plane = jnp.where((turns >> (29 + bit)) & 1 != 0, rolled, plane)
    return plane


def _at_lanes(plane: jax.Array, lanes: jax.Array) -> jax.Array:
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


def _signs(shapes: Tiling, key: Key, tile: Any, plane: int) -> jax.Array:
    """The words of signs of four planes of a tile, of which `plane` is the first."""
    return tiling.sign_word(shapes, key, tile, jnp.uint32(plane), _iota(1))


def _signed(shapes: Tiling, x: jax.Array, word: jax.Array, tile: Any, plane: Any) -> jax.Array:
    bit = tiling.first_bit(shapes, tile, jnp.uint32(plane)) + _iota(0)
    return tiling.signed(x, word, bit)


def _read(ref: Any, plane: Any) -> jax.Array:
    """A plane of a block of planes, or of elements."""
    if len(ref.shape) == 3:
        value: jax.Array = ref[plane]
        return value
    elements: jax.Array = ref[pl.ds(pl.multiple_of(plane * PLANE, PLANE), PLANE)]
    return elements.reshape(SUBLANES, LANES)


def _is_high(shapes: Tiling) -> bool:
    """Whether tiles have planes enough to fill registers with one sublane of each."""
    return shapes.planes >= SUBLANES


def _rows_of_copy(shapes: Tiling) -> int:
    return (shapes.planes + SUBLANES) * PITCH


class _Blocks(NamedTuple):
    """How much of the table and of the array a step of `encode` has in VMEM."""

    rows: int
    slots: int
    tiles: int
    together: int  # Tiles that the loop adds at once.

    @staticmethod
    def of(shapes: Tiling, rows: int, step: int) -> "_Blocks":
        """As many rows as fit, or some slots of one row; tiles that divide those of a part."""
        cells = shapes.planes * PLANE
        most = max(1, min(MOST_ROWS, MOST_CELLS // (shapes.slots * cells)))
        together = max(number for number in range(1, most + 1) if rows % number == 0)
        slots = min(shapes.slots, max(1, MOST_CELLS // cells))
        most = max(1, step // shapes.planes)
        if shapes.slots <= most:
            tiles = most // shapes.slots * shapes.slots
        elif shapes.parts == 1:
            tiles = most
        else:
            tiles = _largest_divisor(shapes.part * shapes.slots, most)
        unrolled = ADDED_PLANES if shapes.planes >= SIGNED_TOGETHER else ADDED_PLANES // 2
        at_once = _largest_divisor(tiles, max(1, unrolled // shapes.planes))
        return _Blocks(together, slots, tiles, at_once if slots == shapes.slots else 1)

    def steps(self, shapes: Tiling) -> int:
        """Steps per part."""
        return pl.cdiv(shapes.part * shapes.slots, self.tiles)


def _largest_divisor(number: int, most: int) -> int:
    return max(divisor for divisor in range(1, most + 1) if number % divisor == 0)


def _encode_kernel(
    keys_ref: Any,
    tiles_ref: Any,
    x_ref: Any,
    table_ref: Any,
    words_ref: Any,
    copy_ref: Any,
    *,
    shapes: Tiling,
    blocks: _Blocks,
) -> None:
    group, span, part, step = (pl.program_id(axis) for axis in range(4))
    first = (part * blocks.steps(shapes) + step) * blocks.tiles

    @pl.when(step == 0)
    def clear() -> None:
        table_ref[...] = jnp.zeros_like(table_ref)

    lane_word = tiling.lane_word(_iota(1))
    cells = shapes.planes * PLANE

    def plane_at(index: Any, plane: Any, ends: bool) -> jax.Array:
        """A plane of a tile; if `ends`, zeros are beyond the end of the array."""
        value = _read(x_ref, index * shapes.planes + plane)
        if not ends:
            return value
        left = jnp.uint32(shapes.size) - (first + index).astype(jnp.uint32) * jnp.uint32(cells)
        left = jnp.where(left > jnp.uint32(cells), cells, left.astype(jnp.int32)) - plane * PLANE
        return jnp.where((_iota(0) * LANES + _iota(1)).astype(jnp.int32) < left, value, 0)

    def dealt(row: int, index: Any) -> tuple[Any, Move]:
        """The slot of a tile in this span of a row, and how it is moved."""
        place = 2 * (row * blocks.tiles + index)
        slot = tiles_ref[0, place].astype(jnp.int32) - span * blocks.slots
        return slot, tiling.move(shapes, tiles_ref[0, place + 1])

    def low(row: int, index: Any, i: int, count: int, ends: bool) -> Iterator[Any]:
        """Where in the table each plane of a tile goes, and what is added there."""
        slot, moved = dealt(row, index + i)
        turns = tiling.turn(moved, lane_word)
        lanes = (_iota(1) - tiling.lane_shift(moved, _iota(0))) & (LANES - 1)
        for plane in range(shapes.planes):
            source = (jnp.uint32(plane) - moved.plane) & jnp.uint32(shapes.planes - 1)
            value = _turned(_at_lanes(plane_at(index + i, source.astype(jnp.int32), ends), lanes), turns)
            at: Any = i * shapes.planes + plane
            if count * shapes.planes % SIGNED_TOGETHER:  # Words begin before the tiles.
                at += (first + index) * shapes.planes & (SIGNED_TOGETHER - 1)
            word = words_ref[row, pl.ds(at // SIGNED_TOGETHER, 1)]
            bit = at % SIGNED_TOGETHER * SUBLANES + _iota(0).astype(jnp.int32)
            yield (row, slot, plane), tiling.signed(value, word, bit.astype(jnp.uint32))

    def high(row: int, index: Any, i: int) -> Iterator[Any]:
        """The same by eight planes, of which a register has one sublane of each."""
        slot, moved = dealt(row, index + i)
        turns = tiling.turn(moved, lane_word)
        shifts = [tiling.lane_shift(moved, jnp.uint32(2 * pair)) & (LANES - 1) for pair in range(4)]
        by = moved.plane.astype(jnp.int32)
        for begin in range(0, shapes.planes, SUBLANES):
            start = ((begin - by) & (shapes.planes - 1)) * PITCH + i * _rows_of_copy(shapes)
            values = [
                pltpu.roll(
                    copy_ref[pl.ds(start + sublane, SUBLANES, stride=PITCH)],
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
            word = jnp.where(_iota(0) < SIGNED_TOGETHER, first_word, second_word)
            word = word >> ((_iota(0) & (SIGNED_TOGETHER - 1)) * SUBLANES)
            for sublane, value in enumerate(values):
                yield (row, slot, begin + sublane), tiling.signed(value, word, jnp.uint32(sublane))

    def copy(index: Any, i: int, ends: bool) -> None:
        """Copies a tile, and its first planes again, to rows from which strides can be read."""
        for plane in range(shapes.planes):
            value = plane_at(index + i, plane, ends)
            for at in range(plane, shapes.planes + SUBLANES - 1, shapes.planes):
                copy_ref[pl.ds(i * _rows_of_copy(shapes) + at * PITCH, SUBLANES)] = value

    def add_all(planes: Iterable[tuple[Any, jax.Array]]) -> None:
        for place, value in planes:
            table_ref[place] += value

    def add(index: Any, count: int, ends: bool) -> None:
        tile = (first + index).astype(jnp.uint32)
        group_of_words = tiling.sign_group(shapes, tile, jnp.uint32(0)) + _iota(0)
        for row in range(blocks.rows):
            key = _key(keys_ref, group * blocks.rows + row)
            words_ref[row] = tiling.sign_words(key, group_of_words, _iota(1))
        for i in range(count):
            if _is_high(shapes):
                copy(index, i, ends)
            for row in range(blocks.rows):
                planes = high(row, index, i) if _is_high(shapes) else low(row, index, i, count, ends)
                if blocks.slots == shapes.slots:
                    add_all(planes)
                    continue
                slot, _ = dealt(row, index + i)
                pl.when((slot >= 0) & (slot < blocks.slots))(functools.partial(add_all, planes))

    def loop(start: Any, stop: Any, count: int, ends: bool) -> None:
        lax.fori_loop(start, stop, lambda i, _: add(i * count, count, ends), None)

    whole = shapes.size // cells
    full = jnp.clip(whole - first, 0, blocks.tiles) // blocks.together
    loop(0, full, blocks.together, False)
    if shapes.size % cells or whole % blocks.together:
        stop = jnp.clip(shapes.tiles - first, 0, blocks.tiles)
        loop(full * blocks.together, stop, 1, shapes.size % cells != 0)


def _tables(shapes: Tiling, blocks: _Blocks, steps: int, keys: jax.Array) -> jax.Array:
    """The slot of each tile in each row, and the word that moves it, of each step."""
    shape = (keys.shape[0] // blocks.rows, steps, blocks.rows, blocks.tiles)
    tile = lax.broadcasted_iota(jnp.uint32, shape, 1) * jnp.uint32(blocks.tiles)
    tile += lax.broadcasted_iota(jnp.uint32, shape, 3)
    fields = keys.reshape(shape[0], 1, blocks.rows, 1, -1)
    key = Key(*(fields[..., i] for i in range(len(Key._fields))))
    pairs = jnp.stack([tiling.slot_of(shapes, key, tile), tiling.move_word(key, tile)], axis=-1)
    return pairs.reshape(*shape[:2], 1, -1)


def encode(
    x: jax.Array,
    seeds: jax.Array,
    *,
    rows: int,
    columns: int,
    planes: int | None = None,
    step: int = STEP,
    interpret: Any = False,
) -> jax.Array:
    """See `reference.encode`."""
    shapes = tiling.tiling(x.size, columns, planes, step)
    blocks = _Blocks.of(shapes, rows, step)
    spans = pl.cdiv(shapes.slots, blocks.slots)
    steps = blocks.steps(shapes)
    cells = blocks.tiles * shapes.planes * PLANE
    dtype = accumulator(x.dtype)
    keys = tiling.keys(seeds, rows)
    x_flat = x.ravel().astype(dtype)
    block: tuple[int, ...] = (cells,)
    if x.size % PLANE == 0:
        x_flat, block = x_flat.reshape(-1, SUBLANES, LANES), (cells // PLANE, SUBLANES, LANES)
    x_flat, keys, tiles = _vma.equally_varying(
        x_flat, keys, _tables(shapes, blocks, shapes.parts * steps, keys)
    )
    last = pl.cdiv(shapes.size, cells) - 1  # The last part may have steps beyond it.
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
                    block,
                    lambda group, span, part, step, keys_ref: (
                        jnp.minimum(part * steps + step, last),
                        *(0 for _ in block[1:]),
                    ),
                ),
            ],
            out_specs=pl.BlockSpec(
                (None, blocks.rows, blocks.slots, *tile),
                lambda group, span, part, step, keys_ref: (part, group, span, 0, 0, 0),
            ),
            scratch_shapes=[
                pltpu.VMEM((blocks.rows, SUBLANES, LANES), jnp.uint32),
                pltpu.VMEM((blocks.together * _rows_of_copy(shapes), LANES), dtype),
            ],
        ),
        out_shape=_vma.like(x_flat, (shapes.parts, rows, spans * blocks.slots, *tile), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
        ),
        interpret=interpret,
    )(keys, tiles, x_flat)
    table = tiling.total(table[:, :, : shapes.slots])  # The slots of the last span may be fewer.
    if _is_high(shapes):
        table = table.reshape(-1, SUBLANES, SUBLANES, LANES).swapaxes(1, 2)
    return table.reshape(rows, columns)


def _decoded(
    shapes: Tiling, estimate: str, keys: list[Key], moves: list[Move], tile: Any, table: Any, words_ref: Any
) -> Iterator[jax.Array]:
    """The estimates of each plane of a tile; `table(row, plane)` is a plane at its place."""
    lane_word = tiling.lane_word(_iota(1))
    turns = [tiling.turn(moved, lane_word) for moved in moves]
    lanes = [(_iota(1) + tiling.lane_shift(moved, _iota(0))) & (LANES - 1) for moved in moves]
    begin = tiling.sign_group(shapes, tile, jnp.uint32(0))
    for row, key in enumerate(keys):
        words_ref[row] = tiling.sign_words(key, begin + _iota(0), _iota(1))
    for plane in range(shapes.planes):
        values = []
        for row, moved in enumerate(moves):
            to = (jnp.uint32(plane) + moved.plane) & jnp.uint32(shapes.planes - 1)
            group = tiling.sign_group(shapes, tile, to) - begin
            word = words_ref[row, pl.ds(group.astype(jnp.int32), 1)]
            value = _signed(shapes, table(row, to.astype(jnp.int32)), word, tile, to)
            values.append(_at_lanes(_turned(value, turns[row], back=True), lanes[row]))
        yield ESTIMATES[estimate](values)


def _decode_kernel(
    keys_ref: Any,
    tiles_ref: Any,
    table_ref: Any,
    out_ref: Any,
    words_ref: Any,
    *,
    shapes: Tiling,
    blocks: _Blocks,
    estimate: str,
) -> None:
    """Decodes the tiles of a step, with the whole table in VMEM."""
    first = pl.program_id(0) * blocks.tiles
    keys = [_key(keys_ref, row) for row in range(blocks.rows)]

    def decode_tile(index: Any, carry: None) -> None:
        at = [2 * (row * blocks.tiles + index) for row in range(blocks.rows)]
        slots = [tiles_ref[0, place].astype(jnp.int32) for place in at]
        moves = [tiling.move(shapes, tiles_ref[0, place + 1]) for place in at]
        tile = (first + index).astype(jnp.uint32)
        table = lambda row, plane: table_ref[row, slots[row], plane]  # noqa: E731
        planes = _decoded(shapes, estimate, keys, moves, tile, table, words_ref)
        for plane, value in enumerate(planes):
            start = (index * shapes.planes + plane) * PLANE
            out_ref[pl.ds(start, PLANE)] = value.reshape(PLANE)

    lax.fori_loop(0, jnp.clip(shapes.tiles - first, 0, blocks.tiles), decode_tile, None)


def _decode_large_kernel(keys_ref: Any, *refs: Any, shapes: Tiling, estimate: str) -> None:
    """Decodes one tile, of which the slot in each row is in VMEM."""
    *table_refs, out_ref, words_ref = refs
    tile = pl.program_id(0).astype(jnp.uint32)
    keys = [_key(keys_ref, row) for row in range(len(table_refs))]
    moves = [tiling.move(shapes, tiling.move_word(key, tile)) for key in keys]
    table = lambda row, plane: table_refs[row][0, 0, plane]  # noqa: E731
    planes = _decoded(shapes, estimate, keys, moves, tile, table, words_ref)
    for plane, value in enumerate(planes):
        out_ref[pl.ds(plane * PLANE, PLANE)] = value.reshape(PLANE)


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
    fits = rows * columns <= MOST_CELLS
    if fits:
        most = max(1, STEP // shapes.planes)
        blocks = _Blocks(rows, shapes.slots, min(most, shapes.tiles), 1)
        steps = pl.cdiv(shapes.tiles, blocks.tiles)
        words = _tables(shapes, blocks, steps, keys)
        kernel = functools.partial(_decode_kernel, shapes=shapes, blocks=blocks, estimate=estimate)
        per_step = pl.BlockSpec(
            (None, None, 1, words.shape[-1]),
            lambda step, keys_ref: (0, step, 0, 0),
            memory_space=pltpu.SMEM,
        )
        whole = pl.BlockSpec(tiles.shape, lambda step, keys_ref: (0, 0, 0, 0, 0))
        in_specs, operands, cells = [per_step, whole], (words, tiles), blocks.tiles * shapes.planes * PLANE
    else:
        kernel = functools.partial(_decode_large_kernel, shapes=shapes, estimate=estimate)
        steps, cells = shapes.tiles, shapes.planes * PLANE
        in_specs = [_block_of_row(shapes, row) for row in range(rows)]
        operands = (tiles,) * rows
    keys, *operands = _vma.equally_varying(keys, *operands)
    dtype = table.dtype if estimate == "median" else jnp.float32
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps,),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((cells,), lambda step, keys_ref: (step,)),
            scratch_shapes=[pltpu.VMEM((rows, SUBLANES, LANES), jnp.uint32)],
        ),
        out_shape=_vma.like(keys, (size,), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
    )(keys, *operands)
    return out.reshape(shape)


def _block_of_row(shapes: Tiling, row: int) -> Any:
    """The slot of a tile in a row."""

    def index_map(tile: Any, keys_ref: Any) -> tuple[Any, ...]:
        slot = tiling.slot_of(shapes, _key(keys_ref, row), tile.astype(jnp.uint32))
        return row, slot.astype(jnp.int32), 0, 0, 0

    return pl.BlockSpec((1, 1, shapes.planes, SUBLANES, LANES), index_map)
