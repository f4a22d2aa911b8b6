"""Splits a tree of updates into a few float32 arrays, and joins them again.

Each array is one unit, which is measured, encoded and decoded as a whole: a leaf in its own shape,
several leaves concatenated to one vector, or a stack of leaves of the same shape.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec, reshard

from jaxcomm._base import Layout, PyTree
from jaxcomm._sharded import require_shards
from jaxcomm._units import Scope, Unit, divide

BUCKET_BYTES = 2**25


class Split(NamedTuple):
    """A tree split into units."""

    arrays: list[jax.Array]
    units: list[Unit]
    join: Callable[[list[jax.Array]], PyTree]  # back to a tree of the original shapes and dtypes


def require_floating(tree: PyTree) -> None:
    """Raises if a leaf is not floating-point, and names its path."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            remedy = (
                "Split real and imaginary parts into separate leaves with "
                "`optax.contrib.split_real_and_imaginary(tx)`."
                if jnp.issubdtype(leaf.dtype, jnp.complexfloating)
                else "Mask it with `optax.masked`; or, if a framework keeps it beside the "
                "parameters, pass the parameters only, as in `nnx.split(model, nnx.Param, ...)`."
            )
            raise ValueError(
                f"The update at {jax.tree_util.keystr(path) or 'the root'} is {leaf.dtype}: only "
                f"floating-point leaves can be averaged. {remedy}"
            )


def explicit_spec(leaf: jax.Array) -> PartitionSpec:
    """The sharding of a leaf over Explicit mesh axes, from its type."""
    spec: PartitionSpec = jax.typeof(leaf).sharding.spec
    return spec if any(spec) else PartitionSpec()


def resharded(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
    """The leaf with this sharding over Explicit mesh axes."""
    return leaf if explicit_spec(leaf) == spec else reshard(leaf, spec)


def _array_of(unit: Unit, leaves: list[jax.Array]) -> jax.Array:
    if unit.form == "alone":
        return leaves[0]
    if unit.form == "stacked":
        return jnp.stack(leaves)
    return jnp.concatenate([leaf.ravel() for leaf in leaves])


def _leaves_of(unit: Unit, array: jax.Array, sizes: list[int]) -> list[jax.Array]:
    if unit.form == "alone":
        return [array]
    # Without the barrier, XLA recomputes the unit for each of its leaves.
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
    """Splits `tree` into the units of :func:`jaxcomm._units.divide`.

    Leaves that are sharded over Explicit axes are replicated first, as the partitioner does over
    automatic axes. `join` restores their sharding.

    Raises:
      ValueError: If a leaf is not floating-point, or if a step says that parameters are sharded.
    """
    require_floating(tree)
    require_shards()
    leaves, treedef = jax.tree.flatten(tree)
    specs = [*map(explicit_spec, leaves)]
    leaves = [resharded(leaf, PartitionSpec()) for leaf in leaves]
    shapes, sizes = [leaf.shape for leaf in leaves], [leaf.size for leaf in leaves]
    units = divide(shapes, scope, bucket_bytes, layout, stacks=stacks)

    def join(arrays: list[jax.Array]) -> PyTree:
        pieces = dict[int, jax.Array]()
        for unit, array in zip(units, arrays, strict=True):
            pieces.update(zip(unit.leaves, _leaves_of(unit, array, sizes), strict=True))
        return jax.tree.unflatten(
            treedef,
            [
                resharded(pieces[number].reshape(leaf.shape).astype(leaf.dtype), spec)
                for number, (leaf, spec) in enumerate(zip(leaves, specs, strict=True))
            ],
        )

    arrays = [
        _array_of(unit, [leaves[leaf].astype(dtype) for leaf in unit.leaves]) for unit in units
    ]
    return Split(arrays, units, join)
