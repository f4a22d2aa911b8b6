r"""Solves a count-sketch for its values, where support and hashes are known: peeling.

A cell that holds one unsolved coordinate gives it exactly. It is subtracted from its other cells,
some of which then hold one only, and so on. Of :math:`K` coordinates under three hashes all are
found, but for a probability that vanishes with :math:`K`, in :math:`1.222 K` cells or more (the
threshold at which a random hypergraph has no core).

References:
  Molloy, `Cores in random hypergraphs and Boolean formulas <https://doi.org/10.1002/rsa.20061>`_,
  2005.
  Eppstein and Goodrich, `Straggler Identification in Round-Trip Data Streams via Newton's
  Identities and Invertible Bloom Filters <https://arxiv.org/abs/0704.3313>`_, 2011.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis
from jaxcomm.compression import _support
from jaxcomm.compression.sketches._cells import Sketch, cells_of

SHRINK = (1.0, 0.5, 0.25, 0.125)
"""What part of all coordinates each stage has room for; it begins once no more are left."""

FEWEST = 2**15  # Fewer coordinates are not worth more than one stage.


class Peeled(NamedTuple):
    """What came out of a table."""

    values: jax.Array  # dtype of the table, [n]; 0 where not solved
    solved: jax.Array  # bool[n]
    rest: jax.Array  # [cells], the table without what was solved
    rounds: jax.Array  # int32[]


class _State(NamedTuple):
    """The coordinates of a stage, and the table."""

    solved: jax.Array  # bool[m]
    values: jax.Array  # [m]
    table: jax.Array  # [cells]
    degree: jax.Array  # int32[cells], how many unsolved coordinates a cell holds
    rounds: jax.Array  # int32[]
    found: jax.Array  # int32[], in the last round


def _signed(value: jax.Array, sign: jax.Array) -> jax.Array:
    return jnp.where(sign < 0, -value, value)


def _round(
    cells: jax.Array, signs: jax.Array, wrap: Callable[[jax.Array], jax.Array], state: _State
) -> _State:
    """Solves every coordinate that is alone in one of its cells."""
    alone = (state.degree[cells] == 1) & ~state.solved[None]
    held = wrap(_signed(state.table[cells], signs))
    value, new = jnp.zeros_like(state.values), jnp.zeros_like(state.solved)
    for row in range(len(cells)):
        value = jnp.where(alone[row] & ~new, held[row], value)
        new = new | alone[row]
    removed = -_signed(value[None], signs)
    fewer = jnp.broadcast_to(-new.astype(jnp.int32)[None], cells.shape)
    table = state.table.at[cells].add(removed, mode="promise_in_bounds")
    degree = state.degree.at[cells].add(fewer, mode="promise_in_bounds")
    return _State(
        state.solved | new,
        jnp.where(new, value, state.values),
        table,
        degree,
        state.rounds + 1,
        jnp.sum(new, dtype=jnp.int32),
    )


def peel(
    table: jax.Array,
    cells: jax.Array,
    signs: jax.Array,
    real: jax.Array,
    wrap: Callable[[jax.Array], jax.Array] = lambda value: value,
) -> Peeled:
    """Solves for the coordinates that are `real`.

    Args:
      table: float32[cells] or int32[cells].
      cells: int32[rows, n], the cells of each coordinate, each in a row of its own.
      signs: int32[rows, n], -1 or 1.
      real: bool[n], which coordinates there are.
      wrap: Of a table that is known modulo a number: the value that is meant.
    """
    size = real.size
    # They are carried through loops, in which they take over what the table varies over.
    table, real = (_axis.varying_like(x, (table, cells, real)) for x in (table, real))
    degree = jnp.zeros_like(table, jnp.int32)
    each = jnp.broadcast_to(real.astype(jnp.int32)[None], cells.shape)
    degree = degree.at[cells].add(each, mode="promise_in_bounds")
    solved, values = ~real, jnp.zeros_like(real, table.dtype)
    rounds = jnp.sum(degree[:0])
    left = jnp.sum(real, dtype=jnp.int32)
    stages = SHRINK if size >= FEWEST else SHRINK[:1]
    for part, next_part in zip(stages, (*stages[1:], 0.0), strict=True):
        room, enough = int(part * size), int(next_part * size)
        whole = room == size
        own_cells, own_signs, own_solved, own_values = cells, signs, solved, values
        if not whole:
            (chosen,) = jnp.nonzero(~solved, size=room, fill_value=size)
            own_cells = cells.at[:, chosen].get(mode="fill", fill_value=0)
            own_signs = signs.at[:, chosen].get(mode="fill", fill_value=0)
            own_solved = chosen == size
            own_values = values.at[chosen].get(mode="fill", fill_value=0)
        state = _State(own_solved, own_values, table, degree, rounds, left)

        def goes_on(loop: tuple[jax.Array, _State], enough: int = enough) -> jax.Array:
            left, state = loop
            return (left > enough) & (state.found > 0)

        def step(
            loop: tuple[jax.Array, _State],
            cells: jax.Array = own_cells,
            signs: jax.Array = own_signs,
        ) -> tuple[jax.Array, _State]:
            left, state = loop
            state = _round(cells, signs, wrap, state)
            return left - state.found, state

        left, state = lax.while_loop(goes_on, step, (left, state))
        if whole:
            solved, values = state.solved, state.values
        else:
            solved = solved.at[chosen].set(state.solved, mode="drop")
            values = values.at[chosen].set(state.values, mode="drop")
        table, degree, rounds = state.table, state.degree, state.rounds
    return Peeled(values, solved & real, table, rounds)


def unpeeled(sketch: Sketch, public: jax.Array, support: jax.Array, room: int) -> jax.Array:
    """How many coordinates of the union are not solved for, of `room` parts, float32[]."""
    if not sketch.parts.size:
        return jnp.zeros(())
    chosen = _support.window(support, public, room, sketch.parts)
    real = _support.real(chosen, sketch.parts)
    cells = cells_of(sketch, public, chosen)
    solved = peel(jnp.zeros(sketch.cells, jnp.int32), *cells, real).solved
    union = _support.coordinates_in(support, sketch.parts)
    return jnp.maximum(union - jnp.sum(solved, dtype=jnp.float32), 0)
