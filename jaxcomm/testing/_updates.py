"""Updates of a tree, one a worker, from rows of numbers and back."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._base import PyTree
from jaxcomm.testing._inputs import inputs

# Unlike leaves: a matrix, a vector in fewer bits, a number.
LEAVES = {
    "bias": jax.ShapeDtypeStruct((3,), "bfloat16"),
    "kernel": jax.ShapeDtypeStruct((5, 2), "float32"),
    "scale": jax.ShapeDtypeStruct((), "float32"),
}


def size_of(leaves: PyTree) -> int:
    """Coordinates of a tree."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(leaves))


def tree_of(leaves: PyTree, rows: np.ndarray) -> PyTree:
    """`[workers, coordinates]` as a tree like `leaves`, each [workers, ...]."""
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
    """Every worker's tree as one row: [workers, coordinates], float64."""
    leaves = [np.asarray(x).astype(np.float64) for x in jax.tree.leaves(tree)]
    return np.concatenate([x.reshape(len(x), -1) for x in leaves], axis=1)


def spacing_of(leaves: PyTree) -> np.ndarray:
    """By how much results of a coordinate's dtype are rounded, relative to them, [coordinates].

    Zero where that is float32, or more.
    """

    def spacing(leaf: Any) -> float:
        return 0.0 if leaf.dtype.itemsize >= 4 else float(jnp.finfo(leaf.dtype).eps)

    return np.concatenate(
        [np.full(math.prod(leaf.shape), spacing(leaf)) for leaf in jax.tree.leaves(leaves)]
    )


def finite_updates(leaves: PyTree, workers: int) -> dict[str, PyTree]:
    """Unlike updates by name; those alone that the leaves' dtypes can hold."""
    found = {name: tree_of(leaves, x) for name, x in inputs(size_of(leaves), workers).items()}
    return {name: tree for name, tree in found.items() if np.isfinite(rows_of(tree)).all()}
