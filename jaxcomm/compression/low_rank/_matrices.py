"""Units as matrices."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxcomm._contract import Context, PyTree


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """`(rows, columns)` of a unit: the last axis is the columns; an array of one axis is a row."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def as_matrix(x: jax.Array) -> jax.Array:
    """The unit as `[rows, columns]`."""
    return x.reshape(matrix_shape(x.shape))


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a @ b` in full float32; the default of GPUs and TPUs rounds to 10 bits or less."""
    return jnp.matmul(a, b, precision="highest")


FEW_COLUMNS = 6
"""Up to this number of columns, XLA for CPUs multiplies factors fastest without a dot."""


def product_of(left: jax.Array, right: jax.Array) -> jax.Array:
    """`left @ right.T` in full float32, `[rows, columns]`."""
    if left.shape[1] > FEW_COLUMNS:
        return jnp.matmul(left, right.T, precision="highest")
    # Without the barrier, XLA would compute the factors again for each coordinate.
    left, right = jax.lax.optimization_barrier((left, right))
    columns = range(left.shape[1])
    terms = [left[:, column, None] * right[None, :, column] for column in columns]
    return sum(terms[1:], terms[0])


def bound_of(left: jax.Array, right: jax.Array) -> jax.Array:
    """A bound on the magnitudes of `left @ right.T`, float32[], without computing it."""
    left, right = (jnp.max(jnp.abs(factor), axis=0) for factor in (left, right))
    return jnp.sum(left * right)


def multiplied(
    factors: Callable[[Context, PyTree], tuple[jax.Array, jax.Array] | None],
) -> Callable[[Context, PyTree], jax.Array]:
    """The `decode` of a payload that is a product of these factors, or the values themselves."""

    def decode(context: Context, payload: PyTree) -> jax.Array:
        found = factors(context, payload)
        if found is None:
            return payload.values / context.count
        return product_of(*found).reshape(context.shape)

    return decode
