"""Units as matrices."""

import math

import jax
import jax.numpy as jnp

from jaxcomm._require import remedy


def require_count(name: str, value: int, least: int) -> None:
    """Raises unless `value` is a Python int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"`{name}` must be a Python int of at least {least}, got {value!r}. {remedy(name)}"
        )


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """`(rows, columns)` of a unit: the last axis is the columns; an array of one axis is a row."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def as_matrix(x: jax.Array) -> jax.Array:
    """The unit as `[rows, columns]`."""
    return x.reshape(matrix_shape(x.shape))


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a @ b` in full float32; the default of GPUs and TPUs rounds to 10 bits or less."""
    return jnp.matmul(a, b, precision="highest")
