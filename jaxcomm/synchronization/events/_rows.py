"""Rows of trees with a leading axis of workers; an event reads and writes a few of them."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._base import PyTree

Index = jax.Array | tuple[jax.Array, ...]


def row(tree: PyTree, worker: Index) -> PyTree:
    """The values of one worker.

    The barrier makes the rows arrays of their own. Otherwise XLA may read them from `tree` after
    the write of :func:`with_row`, and copies all of `tree` in each event to keep the old values.
    """
    return lax.optimization_barrier(jax.tree.map(lambda x: x[worker], tree))


def with_row(tree: PyTree, worker: Index, values: PyTree) -> PyTree:
    """The tree with the values of one worker replaced: in a scan, a write in place."""
    return jax.tree.map(lambda x, y: x.at[worker].set(y), tree, values)


def exchange_row(tree: PyTree, worker: Index, values: PyTree) -> tuple[PyTree, PyTree]:
    """The old values of one worker, and the tree with the new ones.

    For values that do not depend on the old ones: the barrier makes the write wait for the read.
    """
    old, values = lax.optimization_barrier((row(tree, worker), values))
    return old, with_row(tree, worker, values)


def rows_of(tree: PyTree, workers: int) -> PyTree:
    """The same values for each worker, leaves [workers, ...]."""
    return jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x)[None], workers, axis=0), tree)


def scaled(tree: PyTree, factor: jax.Array | float) -> PyTree:
    """The tree times a number, in the dtypes of its leaves."""
    return jax.tree.map(lambda x: x * jnp.asarray(factor, x.dtype), tree)


def plus(tree: PyTree, other: PyTree) -> PyTree:
    """The sum of two trees, in the dtypes of the first."""
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), tree, other)


def minus(tree: PyTree, other: PyTree) -> PyTree:
    """The difference of two trees, in the dtypes of the first."""
    return jax.tree.map(lambda x, y: x - y.astype(x.dtype), tree, other)


def chosen(condition: jax.Array, tree: PyTree, other: PyTree) -> PyTree:
    """The first tree if the condition holds, and otherwise the second."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), tree, other)


def squared_norm(tree: PyTree) -> jax.Array:
    """The sum of the squares of all coordinates, in float32 at least."""
    leaves = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in jax.tree.leaves(tree)]
    return sum((jnp.vdot(x, x) for x in leaves), start=jnp.zeros((), leaves[0].dtype))
