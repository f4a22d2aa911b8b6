"""`encode` and `decode` by tiles as Pallas kernels for TPU.

`encode` keeps rows of the table in VMEM and reads the array once for them, in order, several tiles
per step. `decode` reads one tile of each row per step. The keys of the rows determine which one,
and they are available before the kernel starts (scalar prefetch).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _vma
from pallas_kernels._configs import Config as _Config
from pallas_kernels._configs import require_field
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
    Tiling,
)


@dataclasses.dataclass(frozen=True)
class Config(_Config):
    """Of `encode`."""

    rows: int = 8  # The most in VMEM at once, 1 to 16: the kernel is unrolled over them.
    cells: int = 3 * 2**19  # The most in VMEM at once, in two buffers of 6 MiB: a v4 has 16 MiB.
    together: int = 8  # Planes that are added, 1 to 32: more need more registers than there are.

    def __post_init__(self) -> None:
        require_field("rows", self.rows, range(1, 17), "in 1 to 16")
        allowed = range(PLANE, 2**21 + 1, PLANE)
        require_field("cells", self.cells, allowed, "a multiple of 1024, at most 2**21")
        require_field("together", self.together, range(1, 33), "in 1 to 32")

    @classmethod
    def candidates(cls, dtype: jax.typing.DTypeLike) -> tuple["Config", ...]:
        """Fewer rows read the array more often, and leave more room."""
        return cls(), cls(together=4), cls(together=16), cls(rows=1), cls(cells=3 * 2**18)


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
    """The elements of a plane at these lanes of each sublane."""
    lanes = (lanes & (LANES - 1)).astype(jnp.int32)
    return jnp.take_along_axis(plane, lanes, axis=1, mode="promise_in_bounds")


def _signs(shapes: Tiling, key: Key, tile: Any, plane: int) -> jax.Array:
    """The words of signs of four planes of a tile, of which `plane` is the first."""
    return tiling.sign_word(shapes, key, tile, jnp.uint32(plane), _iota(1))


def _signed(shapes: Tiling, x: jax.Array, word: jax.Array, tile: Any, plane: Any) -> jax.Array:
    bit = tiling.first_bit(shapes, tile, jnp.uint32(plane)) + _iota(0)
    return tiling.signed(x, word, bit)


class _Blocks(NamedTuple):
    """How much of the table and of the array a step of `encode` has in VMEM."""

    rows: int
    slots: int
    tiles: int

    @staticmethod
    def of(shapes: Tiling, rows: int, step: int, config: Config) -> "_Blocks":
        """As many rows as fit, or some slots of one row; whole rounds of tiles, or a divisor."""
        cells = shapes.planes * PLANE
        most = max(1, min(config.rows, config.cells // (shapes.slots * cells)))
        together = max(number for number in range(1, most + 1) if rows % number == 0)
        slots = min(shapes.slots, max(1, config.cells // cells))
        if shapes.slots * shapes.planes <= step:
            return _Blocks(together, slots, step // (shapes.slots * shapes.planes) * shapes.slots)
        most = max(1, step // shapes.planes)
        divisors = [tiles for tiles in range(1, most + 1) if shapes.slots % tiles == 0]
        return _Blocks(together, slots, max(divisors))


def _encode_kernel(
    keys_ref: Any, x_ref: Any, table_ref: Any, *, shapes: Tiling, blocks: _Blocks, config: Config
) -> None:
    group, span, part, step = (pl.program_id(axis) for axis in range(4))
    steps = shapes.part * shapes.slots // blocks.tiles
    first = (part * steps + step) * blocks.tiles

    @pl.when(step == 0)
    def clear() -> None:
        table_ref[...] = jnp.zeros_like(table_ref)

    lane_word = tiling.lane_word(_iota(1))

    def added(row: int, key: Key, index: Any, slot: Any) -> Iterator[tuple[Any, jax.Array]]:
        """Where in the table each plane of a tile goes, and what is added there."""
        tile = (first + index).astype(jnp.uint32)
        moved = tiling.move(shapes, tiling.move_word(key, tile))
        turns = tiling.turn(moved, lane_word)
        lanes = _iota(1) - tiling.lane_shift(moved, _iota(0))
        for plane in range(shapes.planes):
            if plane % SIGNED_TOGETHER == 0:
                word = _signs(shapes, key, tile, plane)
            source = (jnp.uint32(plane) - moved.plane) & jnp.uint32(shapes.planes - 1)
            at = index * shapes.planes + source.astype(jnp.int32)
            value = x_ref[at]
            if shapes.total_planes % shapes.planes:
                # The last tile may extend past the array, where values are undefined.
                value = jnp.where(first * shapes.planes + at < shapes.total_planes, value, 0)
            value = _turned(_at_lanes(value, lanes), turns)
            yield (row, slot, plane), _signed(shapes, value, word, tile, plane)

    def add_all(planes: Iterable[tuple[Any, jax.Array]]) -> None:
        """Adds planes of different places, some at once: a read waits for all writes before it."""
        planes = iter(planes)
        while together := list(itertools.islice(planes, config.together)):
            sums = [table_ref[place] + value for place, value in together]
            for (place, _), total in zip(together, sums, strict=True):
                table_ref[place] = total

    def add(index: Any, carry: None) -> None:
        planes: list[Iterator[tuple[Any, jax.Array]]] = []
        for row in range(blocks.rows):
            key = _key(keys_ref, group * blocks.rows + row)
            slot = tiling.slot_of(shapes, key, (first + index).astype(jnp.uint32))
            slot = slot.astype(jnp.int32) - span * blocks.slots
            if blocks.slots == shapes.slots:
                planes.append(added(row, key, index, slot))
                continue
            here = (slot >= 0) & (slot < blocks.slots)

            @pl.when(here)
            def add_one(row: int = row, key: Key = key, slot: Any = slot) -> None:
                add_all(added(row, key, index, slot))

        add_all(itertools.chain(*planes))

    lax.fori_loop(0, jnp.clip(shapes.tiles - first, 0, blocks.tiles), add, None)


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
    config = config or Config.of(x.dtype)
    blocks = _Blocks.of(shapes, rows, step, config)
    spans = pl.cdiv(shapes.slots, blocks.slots)
    steps = shapes.part * shapes.slots // blocks.tiles
    height = blocks.tiles * shapes.planes
    dtype = accumulator(x.dtype)
    x_planes = jnp.pad(x.ravel().astype(dtype), (0, -x.size % PLANE))
    x_planes, keys = _vma.equally_varying(
        x_planes.reshape(-1, SUBLANES, LANES), tiling.keys(seeds, rows)
    )
    last = pl.cdiv(shapes.total_planes, height) - 1  # The last part may have steps beyond it.
    tile = shapes.planes, SUBLANES, LANES
    table = pl.pallas_call(
        functools.partial(_encode_kernel, shapes=shapes, blocks=blocks, config=config),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows // blocks.rows, spans, shapes.parts, steps),
            in_specs=[
                pl.BlockSpec(
                    (height, SUBLANES, LANES),
                    lambda group, span, part, step, keys_ref: (
                        jnp.minimum(part * steps + step, last),
                        0,
                        0,
                    ),
                )
            ],
            out_specs=pl.BlockSpec(
                (None, blocks.rows, blocks.slots, *tile),
                lambda group, span, part, step, keys_ref: (part, group, span, 0, 0, 0),
            ),
        ),
        out_shape=_vma.like(x_planes, (shapes.parts, rows, spans * blocks.slots, *tile), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
        ),
        interpret=interpret,
    )(keys, x_planes)
    table = table[:, :, : shapes.slots]  # The slots of the last span may be fewer.
    return tiling.total(table.reshape(shapes.parts, rows, columns))


def _decode_kernel(keys_ref: Any, *refs: Any, shapes: Tiling, estimate: str) -> None:
    *table_refs, out_ref, words_ref = refs
    tile = pl.program_id(0).astype(jnp.uint32)
    keys = [_key(keys_ref, row) for row in range(len(table_refs))]
    moves = [tiling.move(shapes, tiling.move_word(key, tile)) for key in keys]
    lane_word = tiling.lane_word(_iota(1))
    turns = [tiling.turn(moved, lane_word) for moved in moves]
    lanes = [_iota(1) + tiling.lane_shift(moved, _iota(0)) for moved in moves]
    for row, key in enumerate(keys):
        for group in range(words_ref.shape[1]):
            words_ref[row, group] = _signs(shapes, key, tile, group * SIGNED_TOGETHER)
    for plane in range(shapes.planes):
        values = []
        for row, moved in enumerate(moves):
            to = (jnp.uint32(plane) + moved.plane) & jnp.uint32(shapes.planes - 1)
            value = table_refs[row][0, 0, to.astype(jnp.int32)]
            word = words_ref[row, (to // SIGNED_TOGETHER).astype(jnp.int32)]
            value = _turned(_signed(shapes, value, word, tile, to), turns[row], back=True)
            values.append(_at_lanes(value, lanes[row]))
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
    groups = max(1, shapes.planes // SIGNED_TOGETHER)
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
            scratch_shapes=[pltpu.VMEM((rows, groups, SUBLANES, LANES), jnp.uint32)],
        ),
        out_shape=_vma.like(table, (height, SUBLANES, LANES), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
    )(keys, *[tiles] * rows)
    return out.ravel()[:size].reshape(shape)
