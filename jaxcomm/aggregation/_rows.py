"""An array cut into one row a worker, for collectives in which each worker owns a row."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

RowOwnership = Literal["block", "cyclic"]


def to_rows(x: jax.Array, workers: int) -> jax.Array:
    """`[workers, ceil(size / workers)]`, filled with zeros."""
    flat = x.ravel()
    return jnp.pad(flat, (0, -flat.size % workers)).reshape(workers, -1)


def from_rows(rows: jax.Array, size: int) -> jax.Array:
    """The first `size` coordinates of the rows laid end to end."""
    return rows.ravel()[:size]


def to_cyclic_rows(x: jax.Array, workers: int) -> jax.Array:
    """`[workers, ceil(length / workers), ...]`: the first axis dealt out in turn, and zeros."""
    leading = x if x.ndim else x[None]
    filled = [(0, -leading.shape[0] % workers), *((0, 0) for _ in leading.shape[1:])]
    dealt = jnp.pad(leading, filled)
    rounds = dealt.shape[0] // workers
    return jnp.swapaxes(dealt.reshape(rounds, workers, *dealt.shape[1:]), 0, 1)


def from_cyclic_rows(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array of `shape` that was dealt out."""
    dealt = jnp.swapaxes(rows, 0, 1)
    return from_rows(dealt, math.prod(shape)).reshape(shape)


def to_block_rows(x: jax.Array, workers: int) -> jax.Array:
    """As :func:`to_rows`, but in the array's own dimensions where the first axis can be cut."""
    if x.ndim > 1 and x.shape[0] % workers == 0:
        return x.reshape(workers, x.shape[0] // workers, *x.shape[1:])
    return to_rows(x, workers)


def from_block_rows(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array of `shape` that was cut."""
    size = math.prod(shape)
    whole = rows if rows.size == size else from_rows(rows, size)
    return whole.reshape(shape)


class RowLayout(NamedTuple):
    """How an array is cut into rows, and put together again."""

    apart: Callable[[jax.Array, int], jax.Array]  # (x, workers) -> [workers, ...]
    together: Callable[[jax.Array, tuple[int, ...]], jax.Array]  # (rows, shape) -> x


ROW_LAYOUTS: dict[str, RowLayout] = {
    "block": RowLayout(to_block_rows, from_block_rows),
    "cyclic": RowLayout(to_cyclic_rows, from_cyclic_rows),
}
