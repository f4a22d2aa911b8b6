"""A tree of updates as a few float32 units, and back.

A unit is what is measured, encoded and sent as one: a bucket of leaves, flat and joined, or one
leaf in its own shape. Few units mean few norms and few collectives.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec, reshard

from jaxcomm._base import PyTree

Scope = Literal["leaf", "bucket", "tree"]

BUCKET_BYTES = 2**25


def check_scope(scope: str) -> None:
    """Raises unless `scope` is one of the three."""
    if scope not in get_args(Scope):
        raise ValueError(f"`scope` must be one of {get_args(Scope)}, got {scope!r}.")


def require_floating(tree: PyTree) -> None:
    """Raises where a leaf is not floating-point, naming its path."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            remedy = (
                "Let real and imaginary parts be leaves of their own, as in "
                "`optax.contrib.split_real_and_imaginary(tx)`."
                if jnp.issubdtype(leaf.dtype, jnp.complexfloating)
                else "Mask it with `optax.masked`."
            )
            raise ValueError(
                f"The update at {jax.tree_util.keystr(path) or 'the root'} is {leaf.dtype}: only "
                f"floating-point leaves can be averaged. {remedy}"
            )


def _groups(sizes: list[int], capacity: int) -> list[list[int]]:
    """Consecutive leaves in as few groups as fit; a leaf beyond the capacity stands alone."""
    groups: list[list[int]] = []
    room = 0
    for leaf, size in enumerate(sizes):
        if not groups or size > room:
            groups.append([])
            room = capacity
        groups[-1].append(leaf)
        room -= size
    return groups


def _spec(leaf: jax.Array) -> PartitionSpec:
    """How the type of a leaf says that it is cut, over axes of a mesh that are Explicit."""
    spec: PartitionSpec = jax.typeof(leaf).sharding.spec
    return spec if any(spec) else PartitionSpec()


def _cut(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
    return leaf if _spec(leaf) == spec else reshard(leaf, spec)


def split(
    tree: PyTree, scope: Scope, bucket_bytes: int, dtype: Any = jnp.float32
) -> tuple[list[jax.Array], Callable[[list[jax.Array]], PyTree]]:
    """The units of `tree`, and the function that undoes it.

    Args:
      tree: Floating-point leaves of any shape and dtype. What is cut over Explicit axes is made
        whole, as the partitioner does over automatic ones, and is cut again where units are joined.
      scope: `"leaf"` keeps each leaf apart and in its shape; `"bucket"` and `"tree"` join leaves.
      bucket_bytes: The most float32 bytes that are joined; leaves are never cut.
      dtype: Of the units.

    Returns:
      The units, and a function from units to a tree with the shapes and dtypes of `tree`.

    Raises:
      ValueError: If a leaf is not floating-point.
    """
    require_floating(tree)
    leaves, treedef = jax.tree.flatten(tree)
    specs = [*map(_spec, leaves)]
    leaves = [_cut(leaf, PartitionSpec()) for leaf in leaves]
    if scope == "leaf":
        units = [leaf.astype(dtype) for leaf in leaves]
    else:
        groups = _groups([leaf.size for leaf in leaves], bucket_bytes // 4)
        units = [
            jnp.concatenate([leaves[i].astype(dtype).ravel() for i in group]) for group in groups
        ]

    def join(units: list[jax.Array]) -> PyTree:
        if scope == "leaf":
            pieces = units
        else:
            pieces = []
            for group, unit in zip(groups, units, strict=True):
                ends = list(itertools.accumulate(math.prod(leaves[i].shape) for i in group))
                # Else XLA computes all that leads to the unit again in each of its pieces.
                pieces += jnp.split(lax.optimization_barrier(unit), ends[:-1])
        return jax.tree.unflatten(
            treedef,
            [
                _cut(piece.reshape(leaf.shape).astype(leaf.dtype), spec)
                for piece, leaf, spec in zip(pieces, leaves, specs, strict=True)
            ],
        )

    return units, join
