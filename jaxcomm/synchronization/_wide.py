"""Conversion to the dtype of sums and anchors, which is independent of the parameter dtype."""

import jax
import jax.numpy as jnp

from jaxcomm._contract import PyTree


def wide(tree: PyTree) -> PyTree:
    """Converts floats to at least float32: float64 stays, 16 and 8 bits are widened."""

    def of_leaf(x: jax.Array) -> jax.Array:
        narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        return x.astype(jnp.float32) if narrow else x

    return jax.tree.map(of_leaf, tree)


def narrow(tree: PyTree, like: PyTree) -> PyTree:
    """Converts leaves back to the dtypes of `like`."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)
