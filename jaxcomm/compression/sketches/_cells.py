"""A count-sketch of chosen parts of an array: the table cells of their coordinates."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxcomm import _noise
from jaxcomm.compression import _support
from jaxcomm.compression._support import Granularity, Parts
from pallas_kernels.count_sketch import ESTIMATES, locations

MOST_ROWS = 32

PEELS = 1.2
"""Cells per coordinate, for three hashes: with fewer, half of the coordinates do not peel."""


class S2Statistics(NamedTuple):
    """The statistics that are reduced over workers before encoding."""

    support: Any  # uint32[ceil(parts / 32)], which parts are not zero
    norm: Any  # the norm of the codes of `s2_codes`; else ()


class S2Payload(NamedTuple):
    """The payload of one unit (a bucket or a leaf), or a sum of such payloads over workers."""

    table: jax.Array  # [rows, columns], float32, or int8 for codes


class Sketch(NamedTuple):
    """The sizes of a table, and of the array that it sketches."""

    rows: int
    columns: int
    parts: Parts
    expected: int  # coordinates expected in the union

    @property
    def cells(self) -> int:
        return self.rows * self.columns

    @property
    def variance(self) -> float:
        """The variance of the estimate for `expected` coordinates, relative to their squares."""
        return (self.expected - 1) / self.cells

    @property
    def room(self) -> int:
        """The number of parts expected in the union."""
        return min(-(-self.expected // self.parts.width), self.parts.number)

    @property
    def room_to_peel(self) -> int:
        """The largest number of parts of which some may peel, and at least the expected number."""
        most = math.ceil(self.cells / PEELS / self.parts.width)
        return min(max(most, self.room), self.parts.number)


MakeSketch: TypeAlias = Callable[[tuple[int, ...]], Sketch]


def require_positive(name: str, number: float) -> None:
    """Raises unless the option is a positive finite Python number."""
    if not isinstance(number, int | float) or not 0 < number < math.inf:
        raise ValueError(
            f"`{name}` must be a positive Python float, got {number!r}: it decides shapes on the "
            f"wire. Under `optax.inject_hyperparams` pass `static_args=('{name}',)`."
        )


def require_rows(rows: int) -> None:
    """Raises unless `rows` is valid."""
    if not isinstance(rows, int) or isinstance(rows, bool) or not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"`rows` must be a Python int in [1, {MOST_ROWS}], got {rows!r}.")


def make_sketch(
    density: float, sketch_ratio: float, rows: int, granularity: Granularity
) -> MakeSketch:
    """Returns `shape -> Sketch`.

    Raises:
      ValueError: If an option is out of range.
    """
    _support.require_density(density)
    require_positive("sketch_ratio", sketch_ratio)
    require_rows(rows)
    _support.require_granularity(granularity)

    def sketch_of(shape: tuple[int, ...]) -> Sketch:
        parts = _support.parts_of(shape, granularity)
        columns = math.ceil(sketch_ratio * density * parts.size / rows)
        return Sketch(rows, columns, parts, math.ceil(density * parts.size))

    return sketch_of


class Cells(NamedTuple):
    """The cells of coordinates in the flat table, and their signs."""

    where: jax.Array  # int32[rows, n]
    sign: jax.Array  # int32[rows, n], -1 or 1


def cells_of(sketch: Sketch, public: jax.Array, chosen: jax.Array) -> Cells:
    """The cells of the chosen parts' coordinates, by hashes that are the same on all workers."""
    coordinates = _support.coordinates(chosen, sketch.parts)
    column, sign = locations(
        coordinates, _noise.seeds(public), rows=sketch.rows, columns=sketch.columns
    )
    return Cells(
        column + jnp.arange(sketch.rows, dtype=column.dtype)[:, None] * sketch.columns, sign
    )


def add(table: jax.Array, cells: Cells, values: jax.Array) -> jax.Array:
    """Adds values, [n], to the flat table."""
    signed = jnp.where(cells.sign < 0, -values[None], values[None])
    return table.at[cells.where].add(signed, mode="promise_in_bounds")


def estimate(table: jax.Array, cells: Cells, how: str) -> jax.Array:
    """Estimates each coordinate, [n], by the mean or the median of its cells in the rows."""
    values = table.at[cells.where].get(mode="promise_in_bounds")
    rows = [*jnp.where(cells.sign < 0, -values, values)]
    return ESTIMATES[how](rows)
