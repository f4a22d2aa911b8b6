"""A tree of updates as units, float32 arrays that are encoded as a whole, and back.

A group shares statistics: a leaf, a bucket of leaves, or all leaves. A unit is encoded as one
array: a large leaf in its own shape, small leaves concatenated, or small leaves of one shape
stacked. The exchange gets all units at once, and decides which of them travel in one message.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec, reshard

from jaxcomm._axis import require_shards
from jaxcomm._contract import Layout, PyTree

Scope = Literal["leaf", "bucket", "tree"]


LARGE = 2**16  # Coordinates; a copy of a larger array costs more than it saves.


class Unit(NamedTuple):
    """The leaves of one unit, by number, with its position and its group."""

    leaves: tuple[int, ...]
    form: Literal["alone", "concatenated", "stacked"]
    key_numbers: tuple[int, ...]  # of the bucket whose PRNG keys it uses; for a stack, of each leaf
    start: int  # its first coordinate in that bucket
    group: int  # the group that shares statistics
    statistics_size: int | None = None  # coordinates of the group, if it has several units


def _buckets(sizes: list[int], capacity: int) -> list[list[int]]:
    """Packs consecutive leaves into buckets; a leaf larger than the capacity has its own bucket."""
    buckets: list[list[int]] = []
    free = 0
    for leaf, size in enumerate(sizes):
        if not buckets or size > free:
            buckets.append([])
            free = capacity
        buckets[-1].append(leaf)
        free -= size
    return buckets


def _parts(bucket: list[int], sizes: list[int], layout: Layout) -> list[list[int]]:
    """The leaves of each unit of a bucket: all small leaves in one unit, each large leaf alone."""
    if layout == "concatenated":
        return [bucket]
    small = [leaf for leaf in bucket if sizes[leaf] < LARGE]
    return [*([small] if small else []), *([leaf] for leaf in bucket if sizes[leaf] >= LARGE)]


def _of_leaves(shapes: list[tuple[int, ...]], *, stacks: bool) -> list[Unit]:
    """Units that share nothing; with `stacks`, small leaves of one shape form one unit."""
    members: dict[object, list[int]] = {}
    for leaf, shape in enumerate(shapes):
        stackable = stacks and 0 < math.prod(shape) < LARGE
        members.setdefault(shape if stackable else leaf, []).append(leaf)
    return [
        Unit(tuple(leaves), "stacked" if len(leaves) > 1 else "alone", tuple(leaves), 0, number)
        for number, leaves in enumerate(members.values())
    ]


def divide(
    shapes: list[tuple[int, ...]],
    scope: Scope,
    bucket_bytes: int,
    layout: Layout,
    *,
    stacks: bool,
) -> list[Unit]:
    """The units for leaves of these shapes.

    Args:
      shapes: The shapes of all leaves.
      scope: Which coordinates share statistics.
      bucket_bytes: The maximum size of a bucket in float32 bytes; leaves are never split.
      layout: The `layout` of :class:`jaxcomm.Codec`: how a bucket or a tree is divided.
      stacks: Whether small leaves of one shape, each with separate statistics, become rows of one
        unit, `[leaves, *shape]`.
    """
    if scope == "leaf":
        return _of_leaves(shapes, stacks=stacks)
    sizes = [*map(math.prod, shapes)]
    units: list[Unit] = []
    for number, bucket in enumerate(_buckets(sizes, bucket_bytes // 4)):
        start = 0
        for part in _parts(bucket, sizes, layout):
            alone = layout != "concatenated" and len(part) == 1
            group = len(units) if layout == "independent" else 0 if scope == "tree" else number
            form: Literal["alone", "concatenated"] = "alone" if alone else "concatenated"
            units.append(Unit(tuple(part), form, (number,), start, group))
            start += sum([sizes[leaf] for leaf in part])
    groups: dict[int, list[Unit]] = {}
    for unit in units:
        groups.setdefault(unit.group, []).append(unit)
    statistics_size = {
        group: sum(sizes[leaf] for unit in members for leaf in unit.leaves)
        for group, members in groups.items()
        if len(members) > 1
    }
    return [unit._replace(statistics_size=statistics_size.get(unit.group)) for unit in units]


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
            raise ValueError(
                f"The update at {jax.tree_util.keystr(path) or 'the root'} is {leaf.dtype}: only "
                "floating-point leaves can be averaged. Mask it with `optax.masked`, or use "
                "`optax.contrib.split_real_and_imaginary(tx)`."
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
    ends = [*itertools.accumulate([sizes[leaf] for leaf in unit.leaves])]
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
