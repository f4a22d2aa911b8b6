"""State as floats, so that it may enter a differentiated function.

JAX differentiates with respect to floating-point arrays only. Integers are carried as float32
values from 0 to 65535, which keep their value when zeros are added to them; a bitcast would not,
since a CPU may flush what is a denormal float.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm._contract import PyTree


@dataclasses.dataclass(frozen=True)
class _Kind:
    """The dtype of a leaf, and its implementation if the leaf is a key."""

    dtype: np.dtype
    key: str | None = None


def _kind(x: jax.Array) -> _Kind:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return _Kind(np.dtype(np.uint32), str(jax.random.key_impl(x)))
    return _Kind(np.dtype(x.dtype))


def _to_float(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    if x.dtype.itemsize <= 2:
        return x.astype(jnp.float32)
    return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.float32)


def _from_float(kind: _Kind, x: jax.Array) -> jax.Array:
    if jnp.issubdtype(kind.dtype, jnp.inexact):
        return x
    if kind.dtype.itemsize <= 2:
        return x.astype(kind.dtype)
    words = lax.bitcast_convert_type(x.astype(jnp.uint16), kind.dtype)
    return words if kind.key is None else jax.random.wrap_key_data(words, impl=kind.key)


def as_floats(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Returns floats, and the function that restores the tree from them, or from slices of them.

    Integers of 4 or 8 bytes, and keys, have one more dimension, the last one.
    """
    leaves, structure = jax.tree.flatten(tree)
    kinds = [*map(_kind, leaves)]

    def restore(floats: PyTree) -> PyTree:
        parts = jax.tree.leaves(floats)
        return jax.tree.unflatten(structure, [*map(_from_float, kinds, parts)])

    return jax.tree.unflatten(structure, [*map(_to_float, leaves)]), restore
