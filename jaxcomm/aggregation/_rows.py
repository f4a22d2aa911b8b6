"""Splits an array into one row per worker, for collectives in which each worker owns a row."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

RowOwnership = Literal["block", "cyclic"]


def to_rows(x: jax.Array, workers: int) -> jax.Array:
    """`[workers, ceil(size / workers)]`, padded with zeros."""
    flat = x.ravel()
    return jnp.pad(flat, (0, -flat.size % workers)).reshape(workers, -1)


def from_rows(rows: jax.Array, size: int) -> jax.Array:
    """The first `size` coordinates of the concatenated rows."""
    return rows.ravel()[:size]


def to_cyclic_rows(x: jax.Array, workers: int) -> jax.Array:
    """`[workers, ceil(length / workers), ...]`: the first axis dealt cyclically, and zeros."""
    leading = x if x.ndim else x[None]
    padding = [(0, -leading.shape[0] % workers), *((0, 0) for _ in leading.shape[1:])]
    padded = jnp.pad(leading, padding)
    rounds = padded.shape[0] // workers
    return jnp.swapaxes(padded.reshape(rounds, workers, *padded.shape[1:]), 0, 1)


def from_cyclic_rows(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_cyclic_rows` for an array of `shape`."""
    return from_rows(jnp.swapaxes(rows, 0, 1), math.prod(shape)).reshape(shape)


def to_block_rows(x: jax.Array, workers: int) -> jax.Array:
    """Like :func:`to_rows`, but keeps the dimensions if `workers` divides the first axis."""
    if x.ndim > 1 and x.shape[0] % workers == 0:
        return x.reshape(workers, x.shape[0] // workers, *x.shape[1:])
    return to_rows(x, workers)


def from_block_rows(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_block_rows` for an array of `shape`."""
    size = math.prod(shape)
    return (rows if rows.size == size else from_rows(rows, size)).reshape(shape)


class RowLayout(NamedTuple):
    """The functions that split an array into rows and join them again."""

    apart: Callable[[jax.Array, int], jax.Array]  # (x, workers) -> [workers, ...]
    together: Callable[[jax.Array, tuple[int, ...]], jax.Array]  # (rows, shape) -> x


ROW_LAYOUTS: dict[str, RowLayout] = {
    "block": RowLayout(to_block_rows, from_block_rows),
    "cyclic": RowLayout(to_cyclic_rows, from_cyclic_rows),
}


def to_slices(x: jax.Array, workers: int) -> jax.Array:
    """`[workers, ...]`: equal parts with as many dimensions as `x`, padded with zeros.

    If `workers` divides the first axis, the other dimensions are kept. Otherwise a part has all
    coordinates on its last axis. A scalar has one coordinate, in the first part.
    """
    if x.ndim and x.shape[0] % workers == 0:
        return x.reshape(workers, x.shape[0] // workers, *x.shape[1:])
    rows = to_rows(x, workers)
    return rows.reshape(workers, *([1] * (x.ndim - 1) + [rows.shape[1]] if x.ndim else []))


def from_slices(slices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_slices` for an array of `shape`."""
    return from_rows(slices, math.prod(shape)).reshape(shape)


def without_padding(part: jax.Array, me: jax.Array, size: int, workers: int) -> jax.Array:
    """Part `me` of an array of `size` coordinates, with zeros where it has padding."""
    if part.size * workers == size:
        return part
    filled = np.clip(size - np.arange(workers) * part.size, 0, part.size)
    position = jnp.arange(part.size).reshape(part.shape)
    return jnp.where(position < jnp.asarray(filled)[me], part, jnp.zeros((), part.dtype))
