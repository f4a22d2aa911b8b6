"""`encode` and `decode` by tiles as Mosaic GPU kernels: eight rows of 128 lanes per block.

A thread is a lane. If a tile has eight planes or more, its eight rows are successive planes of one
sublane, so that one hash gives all their signs. Otherwise they span as many sublanes as needed.
Rows are copied to shared memory, and rolled along lanes by two reads at shifted places. One read is
correct up to the lane where the row wraps, the other from there on. The elements that they read
from neighboring rows are dropped.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _versions
from pallas_kernels.count_sketch import tiling
from pallas_kernels.count_sketch.estimate import ESTIMATES
from pallas_kernels.count_sketch.reference import accumulator
from pallas_kernels.count_sketch.tiling import LANES, PLANE, SUBLANES, Key, Tiling

STAGES = 4  # Tiles in shared memory: one is added while the others are copied.
HEIGHT = 8  # Rows per block.
STAGE = (HEIGHT + 2) * LANES  # With a margin of one row on either side.


def _key(keys_ref: Any, row: Any) -> Key:
    return Key(*(keys_ref[row * 8 + i] for i in range(len(Key._fields))))


def _flat_keys(seeds: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(tiling.keys(seeds, rows), ((0, 0), (0, 1))).ravel()


def _extent(shapes: Tiling) -> tuple[int, int]:
    """The numbers of sublanes and planes that the rows of a block span."""
    planes = min(shapes.planes, HEIGHT)
    return HEIGHT // planes, planes


def _origin(shapes: Tiling, chunk: Any) -> tuple[Any, Any]:
    """The first sublane and plane of the block that processes this chunk of a tile."""
    sublanes, planes = _extent(shapes)
    parts = jnp.uint32(shapes.planes // planes)
    return chunk // parts * jnp.uint32(sublanes), chunk % parts * jnp.uint32(planes)


def _rolled_row(rows_ref: Any, start: Any, roll: Any, inside: jax.Array) -> jax.Array:
    """The 128 elements from `start`, rolled to the right by `roll`; `inside` is lane >= roll."""
    first = (start - roll).astype(jnp.int32)
    return jnp.where(inside, rows_ref[pl.ds(first, LANES)], rows_ref[pl.ds(first + LANES, LANES)])


def _encode_kernel(
    keys_ref: Any, x_ref: Any, table_ref: Any, rows_ref: Any, barriers: Any, *, shapes: Tiling
) -> None:
    row, block = (lax.axis_index(name).astype(jnp.uint32) for name in ("row", "block"))
    slot, chunk = block // jnp.uint32(shapes.planes), block % jnp.uint32(shapes.planes)
    key = _key(keys_ref, row.astype(jnp.int32))
    first_sublane, first_plane = _origin(shapes, chunk)
    sublanes, planes = _extent(shapes)
    lane = lax.broadcasted_iota(jnp.uint32, (LANES,), 0)
    last_plane = jnp.uint32(shapes.total_planes - 1)

    def start(index: Any) -> None:
        tile, holds = tiling.tile_at(shapes, key, slot, index)
        stage = (index & (STAGES - 1)).astype(jnp.int32)
        plane_roll, sublane_roll, _ = tiling.rolls(shapes, key, tile)

        def copy(i: Any, carry: None) -> None:
            sublane = (first_sublane + (i // planes).astype(jnp.uint32) - sublane_roll) & 7
            plane = first_plane + (i % planes).astype(jnp.uint32) - plane_roll
            plane = tile * jnp.uint32(shapes.planes) + (plane & jnp.uint32(shapes.planes - 1))
            height = jnp.minimum(plane, last_plane) * 8 + sublane
            plgpu.copy_gmem_to_smem(
                x_ref.at[height.astype(jnp.int32)],
                rows_ref.at[pl.ds(stage * STAGE + (i + 1) * LANES, LANES)],
                barriers.at[stage],
            )

        @pl.when(holds)
        def copy_all() -> None:
            lax.fori_loop(0, HEIGHT, copy, None)

    def add(step: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        index = step.astype(jnp.uint32)
        tile, holds = tiling.tile_at(shapes, key, slot, index)
        stage = step & (STAGES - 1)
        plane_roll, sublane_roll, lane_roll = tiling.rolls(shapes, key, tile)

        @pl.when(holds)
        def wait() -> None:
            plgpu.barrier_wait(barriers.at[stage])

        inside = lane >= lane_roll
        # A comparison per lane, since a scalar cannot select vectors here.
        kept = lane < jnp.where(holds, jnp.uint32(LANES), jnp.uint32(0))
        results = []
        for sublane in range(sublanes):
            source = (first_sublane + jnp.uint32(sublane) - sublane_roll) & 7
            within = source * LANES + ((lane - lane_roll) & (LANES - 1))
            word = tiling.sign_word(shapes, key, tile, within)
            for plane in range(planes):
                i = sublane * planes + plane
                position = (first_plane + jnp.uint32(plane) - plane_roll) & jnp.uint32(
                    shapes.planes - 1
                )
                position = position + tile * jnp.uint32(shapes.planes)
                first = (stage * STAGE + (i + 1) * LANES).astype(jnp.uint32)
                value = _rolled_row(rows_ref, first, lane_roll, inside)
                value = tiling.signed(value, word, position)
                if shapes.total_planes % shapes.planes:
                    there = holds & (position <= last_plane)
                    kept = lane < jnp.where(there, jnp.uint32(LANES), jnp.uint32(0))
                results.append(sums[i] + jnp.where(kept, value, 0))
        plgpu.commit_smem()  # All threads have read this stage before it is overwritten.
        start(index + jnp.uint32(STAGES))
        return tuple(results)

    for index in range(STAGES):
        start(jnp.uint32(index))
    zeros = tuple(jnp.zeros((LANES,), table_ref.dtype) for _ in range(HEIGHT))
    sums = lax.fori_loop(0, shapes.longest, add, zeros)
    place = (row * jnp.uint32(shapes.slots) + slot) * jnp.uint32(shapes.planes) + first_plane
    for i, total in enumerate(sums):
        height = (place + jnp.uint32(i % planes)) * 8 + first_sublane + jnp.uint32(i // planes)
        table_ref[height.astype(jnp.int32)] = total


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
    dtype = accumulator(x.dtype)
    x_rows = jnp.pad(x.ravel().astype(dtype), (0, shapes.total_planes * PLANE - x.size))
    kernel = _versions.gpu_kernel(
        functools.partial(_encode_kernel, shapes=shapes),
        out_type=jax.ShapeDtypeStruct((rows * columns // LANES, LANES), dtype),
        grid={"row": rows, "block": shapes.slots * shapes.planes},
        scratch_types=[
            plgpu.SMEM((STAGES * STAGE,), dtype),
            plgpu.Barrier(num_arrivals=HEIGHT, num_barriers=STAGES),
        ],
        interpret=interpret,
    )
    table = kernel(_flat_keys(seeds, rows), x_rows.reshape(-1, LANES))
    return table.reshape(rows, columns)


def _decode_kernel(
    keys_ref: Any,
    table_ref: Any,
    out_ref: Any,
    rows_ref: Any,
    barrier: Any,
    *,
    shapes: Tiling,
    rows: int,
    estimate: str,
) -> None:
    block = lax.axis_index("block").astype(jnp.uint32)
    tile, chunk = block // jnp.uint32(shapes.planes), block % jnp.uint32(shapes.planes)
    first_sublane, first_plane = _origin(shapes, chunk)
    sublanes, planes = _extent(shapes)
    lane = lax.broadcasted_iota(jnp.uint32, (LANES,), 0)
    keys = [_key(keys_ref, row) for row in range(rows)]
    rolls = [tiling.rolls(shapes, key, tile) for key in keys]
    slots = [tiling.slot_of(shapes, key, tile) for key in keys]

    def copy(i: Any, carry: None) -> None:
        for row, (plane_roll, sublane_roll, _) in enumerate(rolls):
            slot = jnp.uint32(row * shapes.slots) + slots[row]
            plane = first_plane + (i % planes).astype(jnp.uint32) + plane_roll
            plane = slot * jnp.uint32(shapes.planes) + (plane & jnp.uint32(shapes.planes - 1))
            sublane = (first_sublane + (i // planes).astype(jnp.uint32) + sublane_roll) & 7
            plgpu.copy_gmem_to_smem(
                table_ref.at[(plane * 8 + sublane).astype(jnp.int32)],
                rows_ref.at[pl.ds(row * STAGE + (i + 1) * LANES, LANES)],
                barrier,
            )

    lax.fori_loop(0, HEIGHT, copy, None)
    backs = [(jnp.uint32(LANES) - lane_roll) & (LANES - 1) for _, _, lane_roll in rolls]
    inside = [lane >= back for back in backs]
    plgpu.barrier_wait(barrier)

    def estimate_sublane(i: Any, carry: None) -> None:
        sublane = first_sublane + i.astype(jnp.uint32)
        words = [tiling.sign_word(shapes, key, tile, sublane * LANES + lane) for key in keys]

        def estimate_plane(j: Any, carry: None) -> None:
            plane = tile * jnp.uint32(shapes.planes) + first_plane + j.astype(jnp.uint32)
            values = []
            for row in range(rows):
                start = (row * STAGE + (i * planes + j + 1) * LANES).astype(jnp.uint32)
                value = _rolled_row(rows_ref, start, backs[row], inside[row])
                values.append(tiling.signed(value, words[row], plane))
            result = ESTIMATES[estimate](values)

            @pl.when(plane < jnp.uint32(shapes.total_planes))
            def store() -> None:
                out_ref[(plane * 8 + sublane).astype(jnp.int32)] = result

        lax.fori_loop(0, planes, estimate_plane, None)

    lax.fori_loop(0, sublanes, estimate_sublane, None)


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
    dtype = table.dtype if estimate == "median" else jnp.float32
    kernel = _versions.gpu_kernel(
        functools.partial(_decode_kernel, shapes=shapes, rows=rows, estimate=estimate),
        out_type=jax.ShapeDtypeStruct((shapes.total_planes * SUBLANES, LANES), dtype),
        # One axis: CUDA allows no more than 65535 blocks along the others.
        grid={"block": shapes.tiles * shapes.planes},
        scratch_types=[
            plgpu.SMEM((rows * STAGE,), table.dtype),
            plgpu.Barrier(num_arrivals=rows * HEIGHT),
        ],
        interpret=interpret,
    )
    out = kernel(_flat_keys(seeds, rows), table.reshape(-1, LANES))
    return out.ravel()[:size].reshape(shape)
