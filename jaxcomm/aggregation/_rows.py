"""A vector cut into one row a worker, for collectives in which each worker owns a row."""

import jax
import jax.numpy as jnp


def to_rows(x: jax.Array, workers: int) -> jax.Array:
    """`[workers, ceil(size / workers)]`, filled with zeros."""
    flat = x.ravel()
    return jnp.pad(flat, (0, -flat.size % workers)).reshape(workers, -1)


def from_rows(rows: jax.Array, size: int) -> jax.Array:
    """The first `size` coordinates of the rows laid end to end."""
    return rows.ravel()[:size]
