"""Converts rows of numbers to trees of updates, one per worker, and back."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._contract import PyTree
from jaxcomm.testing._inputs import inputs

# Leaves of different kinds: a matrix, a vector in fewer bits, a scalar.
LEAVES = {
    "bias": jax.ShapeDtypeStruct((3,), "bfloat16"),
    "kernel": jax.ShapeDtypeStruct((5, 2), "float32"),
    "scale": jax.ShapeDtypeStruct((), "float32"),
}


def size_of(leaves: PyTree) -> int:
    """Returns the number of coordinates of a tree."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(leaves))


def tree_of(leaves: PyTree, rows: np.ndarray) -> PyTree:
    """Converts `[workers, coordinates]` to a tree like `leaves`, with leaves [workers, ...]."""
    found: list[Any] = jax.tree.leaves(leaves)
    treedef: Any = jax.tree.structure(leaves)
    ends = np.cumsum([math.prod(leaf.shape) for leaf in found])
    parts = np.split(rows, ends[:-1], axis=1)
    with np.errstate(over="ignore"):
        return treedef.unflatten(
            jnp.asarray(part.reshape(len(rows), *leaf.shape).astype(leaf.dtype))
            for part, leaf in zip(parts, found, strict=True)
        )


def rows_of(tree: PyTree) -> np.ndarray:
    """Returns each worker's tree as one row: [workers, coordinates], float64."""
    leaves = [np.asarray(x).astype(np.float64) for x in jax.tree.leaves(tree)]
    return np.concatenate([x.reshape(len(x), -1) for x in leaves], axis=1)


def spacing_of(leaves: PyTree) -> np.ndarray:
    """Returns the relative rounding error of each coordinate's dtype, [coordinates].

    It is zero for float32 and wider dtypes.
    """

    def spacing(leaf: Any) -> float:
        return 0.0 if leaf.dtype.itemsize >= 4 else float(jnp.finfo(leaf.dtype).eps)

    return np.concatenate(
        [np.full(math.prod(leaf.shape), spacing(leaf)) for leaf in jax.tree.leaves(leaves)]
    )


def finite_updates(leaves: PyTree, workers: int) -> dict[str, PyTree]:
    """Returns updates by name, without those that overflow the dtypes of the leaves."""
    found = {name: tree_of(leaves, x) for name, x in inputs(size_of(leaves), workers).items()}
    return {name: tree for name, tree in found.items() if np.isfinite(rows_of(tree)).all()}
