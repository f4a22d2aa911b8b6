"""`encode` and `decode` by tiles as Mosaic GPU kernels: a plane of 8 rows of 128 lanes per block.

A thread is a lane. A plane is contiguous in memory, so one copy brings it to shared memory. One
word has all eight signs of a thread. Rows are rolled along lanes by two reads at shifted places.
One read is correct up to the lane where the row wraps, the other from there on. The elements that
they read from neighboring rows are dropped. XLA computes the tables of tiles and slots, and of the
words that move them, which are two words for each tile and row. Lanes are turned by selections
among the eight registers of a thread. `decode` turns them back first, and so it writes the planes
to shared memory again. A thread reads and writes there at its own lanes only, before one barrier of
all threads, and reads at other lanes after it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _gpu
from pallas_kernels._configs import Config as _Config
from pallas_kernels._configs import require_field
from pallas_kernels.count_sketch import tiling
from pallas_kernels.count_sketch.reference import ESTIMATES, accumulator
from pallas_kernels.count_sketch.tiling import LANES, PLANE, STEP, SUBLANES, Key, Move, Tiling

STAGE = PLANE + 2 * LANES  # With a margin of one row on either side.
ALIGNED = 4  # Copies need 16 bytes from one example of a batch to the next.
INDEXED = range(PLANE, 2**31)  # Sizes of arrays whose elements are indexed, in int32.


@dataclasses.dataclass(frozen=True)
class Config(_Config):
    """Of `encode`."""

    stages: int = 4  # Planes in shared memory: one is added while the others are copied.

    def __post_init__(self) -> None:
        require_field("stages", self.stages, (2, 4, 8, 16), "2, 4, 8 or 16")

    @classmethod
    def candidates(cls, dtype: jax.typing.DTypeLike) -> tuple["Config", ...]:
        """More stages hide more of the latency, and let fewer blocks run at once."""
        return tuple(cls(stages) for stages in (4, 2, 8))


def _key(keys_ref: Any, row: Any) -> Key:
    return Key(*(keys_ref[row * len(Key._fields) + i] for i in range(len(Key._fields))))


def _columns_of(keys: jax.Array, axes: int) -> Key:
    """The keys of all rows, each field with the rows as the first of `axes` axes."""
    shape = keys.shape[0], *(1,) * (axes - 1)
    return Key(*(keys[:, i].reshape(shape) for i in range(len(Key._fields))))


def _tiles(shapes: Tiling, keys: jax.Array) -> jax.Array:
    """The tile of each round in each slot of each row, each before the word that moves it.

    If there is no tile, its number is at least `shapes.tiles`.
    """
    shape = (keys.shape[0], shapes.slots, shapes.rounds)
    slot, round_ = (lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (1, 2))
    columns = _columns_of(keys, 3)
    tile = tiling.tile_at(shapes, columns, slot, round_)[0]
    return jnp.stack([tile, tiling.move_word(columns, tile)], axis=-1).ravel()


def _slots(shapes: Tiling, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The slot of each tile in each row, and the word by which it is moved."""
    tile = lax.broadcasted_iota(jnp.uint32, (keys.shape[0], shapes.tiles), 1)
    columns = _columns_of(keys, 2)
    slot = tiling.slot_of(shapes, columns, tile)
    return slot.ravel(), tiling.move_word(columns, tile).ravel()


def _copy_plane(ref: Any, plane: Any, to_ref: Any, start: Any, barrier: Any) -> None:
    """Copies a plane of an array of planes, or of elements, to the elements from `start`."""
    plane = plane.astype(jnp.int32)
    source = plane if len(ref.shape) == 2 else pl.ds(plane * PLANE, PLANE)
    # All is within bounds. Other modes use a tensor map, whose copies have at most 256 elements.
    plgpu.copy_gmem_to_smem(
        ref.at[source],
        to_ref.at[pl.ds(start, PLANE)],
        barrier,
        oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
    )


def _turned(rows: list[jax.Array], turns: jax.Array, back: bool = False) -> list[jax.Array]:
    """Eight sublanes, of which each lane is turned by its own number, or turned back."""
    for bit in range(3):
        here = (turns >> (29 + bit)) & 1 != 0
        by = -(1 << bit) if back else 1 << bit
        rows = [jnp.where(here, rows[(k - by) % SUBLANES], rows[k]) for k in range(SUBLANES)]
    return rows


def _rolled_row(rows_ref: Any, start: Any, roll: Any, inside: jax.Array) -> jax.Array:
    """The 128 elements from `start`, rolled to the right by `roll`; `inside` is lane >= roll."""
    first = (start - roll).astype(jnp.int32)
    return jnp.where(inside, rows_ref[pl.ds(first, LANES)], rows_ref[pl.ds(first + LANES, LANES)])


def _signs(shapes: Tiling, key: Key, tile: Any, plane: Any, lane: Any) -> Any:
    """The signs of the 8 sublanes of a plane, as the lowest bits."""
    word = tiling.sign_word(shapes, key, tile, plane, lane)
    return word >> tiling.first_bit(shapes, tile, plane)


def _encode_kernel(keys_ref: Any, tiles_ref: Any, *refs: Any, shapes: Tiling, stages: int) -> None:
    *x_refs, table_ref, rows_ref, barriers = refs
    rows = table_ref.shape[0] // (shapes.parts * shapes.slots * shapes.planes * SUBLANES)
    row, part, block = (lax.axis_index(n).astype(jnp.uint32) for n in ("row", "part", "block"))
    slot, plane = block // jnp.uint32(shapes.planes), block & jnp.uint32(shapes.planes - 1)
    key = _key(keys_ref, row.astype(jnp.int32))
    lane = lax.broadcasted_iota(jnp.uint32, (LANES,), 0)
    lane_word = tiling.lane_word(lane)
    column = (row * jnp.uint32(shapes.slots) + slot) * jnp.uint32(shapes.rounds)
    first = part * jnp.uint32(shapes.part)
    last = jnp.minimum(first + jnp.uint32(shapes.part), jnp.uint32(shapes.rounds))

    def tile_of(round_: Any) -> Any:
        return tiles_ref[2 * (column + round_).astype(jnp.int32)]

    if shapes.tiles % shapes.slots:  # Not every slot has a tile in the last round.
        missing = tile_of(last - 1) >= jnp.uint32(shapes.tiles)
        last = jnp.where(missing, last - 1, last)

    def move_of(round_: Any) -> Move:
        return tiling.move(shapes, tiles_ref[2 * (column + round_).astype(jnp.int32) + 1])

    def start(round_: Any) -> None:
        @pl.when(round_ < last)
        def copy() -> None:
            source = (plane - move_of(round_).plane) & jnp.uint32(shapes.planes - 1)
            source += tile_of(round_) * jnp.uint32(shapes.planes)
            stage = ((round_ - first) & (stages - 1)).astype(jnp.int32)
            to = stage * STAGE + LANES
            whole = jnp.uint32(math.prod(x_refs[0].shape) // PLANE)
            if len(x_refs) == 1:
                _copy_plane(x_refs[0], source, rows_ref, to, barriers.at[stage])
                return

            @pl.when(source < whole)
            def copy_whole() -> None:
                _copy_plane(x_refs[0], source, rows_ref, to, barriers.at[stage])

            @pl.when(source >= whole)
            def copy_end() -> None:
                beyond = jnp.minimum(source - whole, jnp.uint32(1))
                _copy_plane(x_refs[1], beyond, rows_ref, to, barriers.at[stage])

    def add(step: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        round_ = first + step.astype(jnp.uint32)
        tile = tile_of(round_)
        stage = step & (stages - 1)
        moved = move_of(round_)
        signs = _signs(shapes, key, tile, plane, lane)
        turns = tiling.turn(moved, lane_word)
        plgpu.barrier_wait(barriers.at[stage])
        values = []
        for sublane in range(SUBLANES):
            shift = tiling.lane_shift(moved, jnp.uint32(sublane)) & (LANES - 1)
            begin = stage.astype(jnp.uint32) * STAGE + (sublane + 1) * LANES
            values.append(_rolled_row(rows_ref, begin, shift, lane >= shift))
        values = _turned(values, turns)
        results = [
            total + tiling.signed(value, signs, sublane)
            for sublane, (total, value) in enumerate(zip(sums, values, strict=True))
        ]
        plgpu.commit_smem()  # All threads have read this stage before it is overwritten.
        start(round_ + stages)
        return tuple(results)

    for stage in range(stages):
        start(first + jnp.uint32(stage))
    zeros = tuple(jnp.zeros((LANES,), table_ref.dtype) for _ in range(SUBLANES))
    sums = lax.fori_loop(0, (last - first).astype(jnp.int32), add, zeros)
    place = (part * jnp.uint32(rows) + row) * jnp.uint32(shapes.slots) + slot
    place = (place * jnp.uint32(shapes.planes) + plane) * SUBLANES
    for sublane, total in enumerate(sums):
        table_ref[(place + jnp.uint32(sublane)).astype(jnp.int32)] = total


def _planes(x: jax.Array, shapes: Tiling, padded: bool) -> list[jax.Array]:
    """The array by planes. If it does not fill its tiles, also a plane of its end and one of zeros.

    The array is not copied, unless it is ragged and `padded` or too large to be indexed.
    """
    end = jnp.zeros(2 * PLANE, x.dtype)
    if x.size % PLANE and x.size in INDEXED and not padded:
        ragged = x[x.size // PLANE * PLANE :]
        return [x, end.at[: ragged.size].set(ragged).reshape(-1, PLANE)]
    planes = jnp.pad(x, (0, -x.size % PLANE)).reshape(-1, PLANE)
    return [planes, end.reshape(-1, PLANE)] if shapes.total_planes % shapes.planes else [planes]


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
    stages = (config or Config.of(x.dtype)).stages
    dtype = accumulator(x.dtype)
    keys = tiling.keys(seeds, rows)
    kernel = _gpu.gpu_kernel(
        functools.partial(_encode_kernel, shapes=shapes, stages=stages),
        out_type=jax.ShapeDtypeStruct((shapes.parts * rows * columns // LANES, LANES), dtype),
        grid={"row": rows, "part": shapes.parts, "block": shapes.slots * shapes.planes},
        scratch_types=[
            plgpu.SMEM((stages * STAGE,), dtype),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        ],
        own_barriers=True,
        interpret=interpret,
    )

    def run(padded: bool, x: jax.Array, keys: jax.Array) -> jax.Array:
        operands = _planes(x, shapes, padded)
        table: jax.Array = kernel(keys.ravel(), _tiles(shapes, keys), *operands)
        return table

    flat = x.ravel().astype(dtype)
    call: Callable[..., jax.Array] = functools.partial(run, False)
    if flat.size % ALIGNED:
        call = _gpu.unless_batched(call, functools.partial(run, True))
    return tiling.total(call(flat, keys).reshape(shapes.parts, rows, columns))


def _decode_kernel(
    keys_ref: Any,
    slots_ref: Any,
    words_ref: Any,
    table_ref: Any,
    *refs: Any,
    shapes: Tiling,
    rows: int,
    estimate: str,
) -> None:
    *out_refs, rows_ref, barrier = refs
    position = lax.axis_index("block").astype(jnp.uint32)
    tile, plane = position // jnp.uint32(shapes.planes), position & jnp.uint32(shapes.planes - 1)
    lane = lax.broadcasted_iota(jnp.uint32, (LANES,), 0)
    keys = [_key(keys_ref, row) for row in range(rows)]
    tiles = [(jnp.uint32(row * shapes.tiles) + tile).astype(jnp.int32) for row in range(rows)]
    moves = [tiling.move(shapes, words_ref[index]) for index in tiles]
    places = [(plane + moved.plane) & jnp.uint32(shapes.planes - 1) for moved in moves]
    for row, place in enumerate(places):
        slot = slots_ref[tiles[row]]
        source = (jnp.uint32(row * shapes.slots) + slot) * jnp.uint32(shapes.planes) + place
        _copy_plane(table_ref, source, rows_ref, row * STAGE + LANES, barrier)
    signs = [_signs(shapes, key, tile, at, lane) for key, at in zip(keys, places, strict=True)]
    lane_word = tiling.lane_word(lane)
    turns = [tiling.turn(moved, lane_word) for moved in moves]
    plgpu.barrier_wait(barrier)
    for row in range(rows):
        starts = [row * STAGE + (sublane + 1) * LANES for sublane in range(SUBLANES)]
        placed = [rows_ref[pl.ds(first, LANES)] for first in starts]
        placed = [tiling.signed(x, signs[row], sublane) for sublane, x in enumerate(placed)]
        for first, value in zip(starts, _turned(placed, turns[row], back=True), strict=True):
            rows_ref[pl.ds(first, LANES)] = value
    plgpu.commit_smem()  # All lanes are written before others read them.
    results = []
    for sublane in range(SUBLANES):
        values = []
        for row, moved in enumerate(moves):
            shift = tiling.lane_shift(moved, jnp.uint32(sublane))
            back = (LANES - shift) & (LANES - 1)
            begin = jnp.uint32(row * STAGE + (sublane + 1) * LANES)
            values.append(_rolled_row(rows_ref, begin, back, lane >= back))
        results.append(ESTIMATES[estimate](values))

    def store(ref: Any, plane: Any) -> None:
        for sublane, result in enumerate(results):
            if len(ref.shape) == 2:
                ref[(plane * SUBLANES).astype(jnp.int32) + sublane] = result
            else:
                first = plane.astype(jnp.int32) * PLANE + sublane * LANES
                ref[pl.ds(first, LANES)] = result

    if len(out_refs) == 1:
        store(out_refs[0], position)
        return
    whole = jnp.uint32(shapes.size // PLANE)

    @pl.when(position < whole)
    def store_whole() -> None:
        store(out_refs[0], position)

    @pl.when(position == whole)
    def store_end() -> None:
        store(out_refs[1], jnp.uint32(0))


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
    keys = tiling.keys(seeds, rows)
    dtype = table.dtype if estimate == "median" else jnp.float32
    ragged = size % PLANE if size in INDEXED else 0
    by_rows = jax.ShapeDtypeStruct((shapes.total_planes * SUBLANES, LANES), dtype)
    in_two = (jax.ShapeDtypeStruct((size,), dtype), jax.ShapeDtypeStruct((PLANE,), dtype))
    kernel = _gpu.gpu_kernel(
        functools.partial(_decode_kernel, shapes=shapes, rows=rows, estimate=estimate),
        out_type=in_two if ragged else (by_rows,),
        # One axis: CUDA allows no more than 65535 blocks along the others.
        grid={"block": shapes.total_planes},
        scratch_types=[
            plgpu.SMEM((rows * STAGE,), table.dtype),
            plgpu.Barrier(num_arrivals=rows),
        ],
        own_barriers=True,
        interpret=interpret,
    )
    out, *end = kernel(keys.ravel(), *_slots(shapes, keys), table.reshape(-1, PLANE))
    if end:  # In place: the rest is not copied.
        return out.at[size - ragged :].set(end[0][:ragged]).reshape(shape)
    return out.ravel()[:size].reshape(shape)
