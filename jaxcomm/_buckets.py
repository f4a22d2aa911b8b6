"""A tree of updates as a few float32 arrays, and back.

An array is a unit, which is measured, encoded and decoded at once: a leaf in its own shape, leaves
joined to one vector, or a stack of leaves of one shape.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec, reshard

from jaxcomm._base import Layout, PyTree
from jaxcomm._units import Scope, Unit, divide

BUCKET_BYTES = 2**25


class Split(NamedTuple):
    """A tree in units."""

    arrays: list[jax.Array]
    units: list[Unit]
    join: Callable[[list[jax.Array]], PyTree]  # to a tree of the same shapes and dtypes


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


def _spec(leaf: jax.Array) -> PartitionSpec:
    """How the type of a leaf says that it is cut, over axes of a mesh that are Explicit."""
    spec: PartitionSpec = jax.typeof(leaf).sharding.spec
    return spec if any(spec) else PartitionSpec()


def _cut(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
    return leaf if _spec(leaf) == spec else reshard(leaf, spec)


def _together(unit: Unit, leaves: list[jax.Array]) -> jax.Array:
    if unit.form == "alone":
        return leaves[0]
    if unit.form == "stacked":
        return jnp.stack(leaves)
    return jnp.concatenate([leaf.ravel() for leaf in leaves])


def _pieces(unit: Unit, array: jax.Array, sizes: list[int]) -> list[jax.Array]:
    if unit.form == "alone":
        return [array]
    # Else XLA computes all that leads to the unit again in each of its pieces.
    whole = lax.optimization_barrier(array)
    if unit.form == "stacked":
        return [*whole]
    ends = [*itertools.accumulate(sizes[leaf] for leaf in unit.leaves)]
    return jnp.split(whole, ends[:-1])


def split(
    tree: PyTree,
    scope: Scope,
    bucket_bytes: int,
    dtype: Any = jnp.float32,
    layout: Layout = "concatenated",
    *,
    stacks: bool = False,
) -> Split:
    """The units of `tree`, as :func:`jaxcomm._units.divide` says.

    What is cut over Explicit axes is made whole, as the partitioner does over automatic ones, and
    is cut again where units are joined.

    Raises:
      ValueError: If a leaf is not floating-point.
    """
    require_floating(tree)
    leaves, treedef = jax.tree.flatten(tree)
    specs = [*map(_spec, leaves)]
    leaves = [_cut(leaf, PartitionSpec()) for leaf in leaves]
    shapes, sizes = [leaf.shape for leaf in leaves], [leaf.size for leaf in leaves]
    units = divide(shapes, scope, bucket_bytes, layout, stacks=stacks)

    def join(arrays: list[jax.Array]) -> PyTree:
        pieces = dict[int, jax.Array]()
        for unit, array in zip(units, arrays, strict=True):
            pieces.update(zip(unit.leaves, _pieces(unit, array, sizes), strict=True))
        return jax.tree.unflatten(
            treedef,
            [
                _cut(pieces[number].reshape(leaf.shape).astype(leaf.dtype), spec)
                for number, (leaf, spec) in enumerate(zip(leaves, specs, strict=True))
            ],
        )

    arrays = [
        _together(unit, [leaves[leaf].astype(dtype) for leaf in unit.leaves]) for unit in units
    ]
    return Split(arrays, units, join)
