"""Trees of arrays: the dtype of sums, rows of workers, and arithmetic in the dtypes of leaves."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import PyTree

Index = jax.Array | tuple[jax.Array, ...]


def wide(tree: PyTree) -> PyTree:
    """Converts floats to at least float32: float64 stays, 16 and 8 bits are widened."""

    def of_leaf(x: jax.Array) -> jax.Array:
        narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        return x.astype(jnp.float32) if narrow else x

    return jax.tree.map(of_leaf, tree)


def narrow(tree: PyTree, like: PyTree) -> PyTree:
    """Converts leaves back to the dtypes of `like`."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def empty(tree: PyTree) -> PyTree:
    """Leaves [0] of the same dtypes, which remember them in a state."""
    return jax.tree.map(lambda x: jnp.zeros(0, x.dtype), tree)


def row(tree: PyTree, worker: Index) -> PyTree:
    """The values of one worker."""
    return row_before(tree, worker, ())[0]


def row_before(tree: PyTree, worker: Index, values: PyTree) -> tuple[PyTree, PyTree]:
    """The values of one worker, and `values`, which are available only after this read.

    A write whose values do not depend on the row must take its values from here. Otherwise XLA may
    read the row after the write, and copies all of `tree` in each event to keep the old row. The
    condition always holds. XLA does not move a read out of a branch, which it would do with an
    optimization barrier in some versions.
    """
    index = worker[0] if isinstance(worker, tuple) else worker

    def read() -> tuple[PyTree, PyTree]:
        return jax.tree.map(lambda x: x[worker], tree), values

    def nothing() -> tuple[PyTree, PyTree]:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(read))

    return lax.cond(jnp.all(index >= 0), read, nothing)


def with_row(tree: PyTree, worker: Index, values: PyTree) -> PyTree:
    """The tree with the values of one worker replaced: in a scan, a write in place."""
    return jax.tree.map(lambda x, y: x.at[worker].set(y), tree, values)


def rows_of(tree: PyTree, workers: int) -> PyTree:
    """The same values for each worker, leaves [workers, ...]."""
    return jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x)[None], workers, axis=0), tree)


def renewed(rows: PyTree, which: jax.Array, values: PyTree) -> PyTree:
    """The rows, with those of the mask `which`, bool[workers], replaced by the same values."""

    def of_leaf(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(which.reshape(-1, *[1] * jnp.ndim(y)), y, x)

    return jax.tree.map(of_leaf, rows, values)


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
