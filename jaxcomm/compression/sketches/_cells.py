"""A count-sketch of chosen parts of an array: the table cells of their coordinates.

Peeling solves it for its values, with known support and hashes.

A cell with only one unsolved coordinate contains its exact value. The value is subtracted from the
other cells of the coordinate; some of these then contain only one unsolved coordinate, and so on.
Take :math:`K` coordinates, three hashes and at least :math:`1.222 K` cells, the threshold at which
a random hypergraph has no core. Then all coordinates are solved, except with a probability that
vanishes as :math:`K` grows.

References:
  Molloy, `Cores in random hypergraphs and Boolean formulas <https://doi.org/10.1002/rsa.20061>`_,
  2005.
  Eppstein and Goodrich, `Straggler Identification in Round-Trip Data Streams via Newton's
  Identities and Invertible Bloom Filters <https://arxiv.org/abs/0704.3313>`_, 2011.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis, _noise
from jaxcomm._contract import Context
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
    def capacity(self) -> int:
        """The number of parts expected in the union."""
        return min(-(-self.expected // self.parts.width), self.parts.number)

    @property
    def peeling_capacity(self) -> int:
        """The largest number of parts of which some may peel, and at least the expected number."""
        most = math.ceil(self.cells / PEELS / self.parts.width)
        return min(max(most, self.capacity), self.parts.number)


def make_sketch(
    density: float, sketch_ratio: float, rows: int, granularity: Granularity
) -> Callable[[tuple[int, ...]], Sketch]:
    """Returns `shape -> Sketch`.

    Raises:
      ValueError: If an option is out of range.
    """

    def sketch_of(shape: tuple[int, ...]) -> Sketch:
        parts = _support.parts_of(shape, granularity)
        columns = math.ceil(sketch_ratio * density * parts.size / rows)
        return Sketch(rows, columns, parts, math.ceil(density * parts.size))

    return sketch_of


def chosen_parts(context: Context, sketch: Sketch, capacity: int) -> jax.Array:
    """The parts of the union that are sketched, at most `capacity`, the same on all workers."""
    return _support.window(context.statistics.support, context.keys.shared, capacity, sketch.parts)


class Cells(NamedTuple):
    """The cells of coordinates in the flat table, and their signs."""

    where: jax.Array  # int32[rows, n]
    sign: jax.Array  # int32[rows, n], -1 or 1


def cells_of(sketch: Sketch, shared: jax.Array, chosen: jax.Array) -> Cells:
    """The cells of the chosen parts' coordinates, by hashes that are the same on all workers."""
    if not sketch.cells:
        return Cells(*[jnp.zeros((sketch.rows, 0), jnp.int32)] * 2)
    coordinates = _support.coordinates(chosen, sketch.parts)
    column, sign = locations(
        coordinates, _noise.seeds(shared), rows=sketch.rows, columns=sketch.columns
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


SHRINK = (1.0, 0.5, 0.25, 0.125)
"""The capacity of each stage, as a fraction of all coordinates. It starts when they fit."""

FEWEST = 2**15  # For fewer coordinates, more than one stage does not pay off.


class Peeled(NamedTuple):
    """The result of peeling a table."""

    values: jax.Array  # [n], of the table's dtype; 0 where not solved
    solved: jax.Array  # bool[n]
    rest: jax.Array  # [cells], the table without the solved coordinates
    rounds: jax.Array  # int32[]


class _State(NamedTuple):
    """The coordinates of a stage, and the table."""

    left: jax.Array  # int32[], coordinates of all stages that are not solved
    solved: jax.Array  # bool[m]
    values: jax.Array  # [m]
    table: jax.Array  # [cells]
    degree: jax.Array  # int32[cells], the number of unsolved coordinates in each cell
    rounds: jax.Array  # int32[]
    found: jax.Array  # int32[], coordinates solved in the last round


def _signed(value: jax.Array, sign: jax.Array) -> jax.Array:
    return jnp.where(sign < 0, -value, value)


def _round(
    cells: jax.Array, signs: jax.Array, wrap: Callable[[jax.Array], jax.Array], state: _State
) -> _State:
    """Solves each coordinate that is the only unsolved one in one of its cells."""
    single = (state.degree[cells] == 1) & ~state.solved[None]
    cell_values = wrap(_signed(state.table[cells], signs))
    value, new = jnp.zeros_like(state.values), jnp.zeros_like(state.solved)
    for row in range(len(cells)):
        value = jnp.where(single[row] & ~new, cell_values[row], value)
        new = new | single[row]
    removed = -_signed(value[None], signs)
    fewer = jnp.broadcast_to(-new.astype(jnp.int32)[None], cells.shape)
    table = state.table.at[cells].add(removed, mode="promise_in_bounds")
    degree = state.degree.at[cells].add(fewer, mode="promise_in_bounds")
    found = jnp.sum(new, dtype=jnp.int32)
    values = jnp.where(new, value, state.values)
    left, rounds = state.left - found, state.rounds + 1
    return _State(left, state.solved | new, values, table, degree, rounds, found)


def peel(
    table: jax.Array,
    cells: jax.Array,
    signs: jax.Array,
    real: jax.Array,
    wrap: Callable[[jax.Array], jax.Array] = lambda value: value,
) -> Peeled:
    """Solves for the coordinates that `real` marks.

    Args:
      table: float32[cells] or int32[cells].
      cells: int32[rows, n], the cells of each coordinate, one in each row.
      signs: int32[rows, n], -1 or 1.
      real: bool[n], which entries are coordinates, and not padding.
      wrap: For a table modulo a number, maps a cell to the value that it represents.
    """
    size = real.size
    # Loop carries must vary over the same mesh axes as the table.
    table, real = (_axis.varying_like(x, (table, cells, real)) for x in (table, real))
    degree = jnp.zeros_like(table, jnp.int32)
    each = jnp.broadcast_to(real.astype(jnp.int32)[None], cells.shape)
    degree = degree.at[cells].add(each, mode="promise_in_bounds")
    solved, values = ~real, jnp.zeros_like(real, table.dtype)
    rounds = jnp.sum(degree[:0], dtype=degree.dtype)
    left = jnp.sum(real, dtype=jnp.int32)
    stages = SHRINK if size >= FEWEST else SHRINK[:1]
    for part, next_part in zip(stages, (*stages[1:], 0.0), strict=True):
        capacity, enough = int(part * size), int(next_part * size)
        whole = capacity == size
        stage_cells, stage_signs, stage_solved, stage_values = cells, signs, solved, values
        if not whole:
            (chosen,) = jnp.nonzero(~solved, size=capacity, fill_value=size)
            stage_cells = cells.at[:, chosen].get(mode="fill", fill_value=0)
            stage_signs = signs.at[:, chosen].get(mode="fill", fill_value=0)
            stage_solved = chosen == size
            stage_values = values.at[chosen].get(mode="fill", fill_value=0)
        state = lax.while_loop(
            lambda state, enough=enough: (state.left > enough) & (state.found > 0),  # type: ignore[misc]
            functools.partial(_round, stage_cells, stage_signs, wrap),
            _State(left, stage_solved, stage_values, table, degree, rounds, left),
        )
        if whole:
            solved, values = state.solved, state.values
        else:
            solved = solved.at[chosen].set(state.solved, mode="drop")
            values = values.at[chosen].set(state.values, mode="drop")
        left, table, degree, rounds = state.left, state.table, state.degree, state.rounds
    return Peeled(values, solved & real, table, rounds)


def unpeeled(context: Context, sketch: Sketch, capacity: int) -> jax.Array:
    """The number of coordinates of the union that peeling `capacity` parts does not solve."""
    chosen = chosen_parts(context, sketch, capacity)
    real = _support.real(chosen, sketch.parts)
    cells = cells_of(sketch, context.keys.shared, chosen)
    solved = peel(jnp.zeros(sketch.cells, jnp.int32), *cells, real).solved
    union = _support.coordinates_in(context.statistics.support, sketch.parts)
    return jnp.maximum(union - jnp.sum(solved, dtype=jnp.float32), 0)
