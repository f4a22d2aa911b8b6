"""What a step is called with: checked, placed on the mesh, and donated."""

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomm import _axis
from jaxcomm._axis import state_specs
from jaxcomm._contract import AxisName, PerWorker, PyTree
from jaxcomm._mesh import (
    axes_in,
    explicit_sharding,
    kept_specs,
    place,
    raise_sharded,
    require_kept,
    require_workers,
)

Step: TypeAlias = Callable[..., tuple[Any, ...]]


class Carry(NamedTuple):
    """What a step takes and returns changed."""

    params: PyTree
    model_state: PyTree  # () if the loss has none
    opt_state: optax.OptState


class Given(NamedTuple):
    """What a loss is computed from, besides parameters and model state."""

    batch: PyTree  # the rows of all devices, or of one
    key: Any  # one key of all workers, or None
    shared: PyTree  # equal on all workers


def require_divisible(batch: PyTree, devices: int, rows_differ: bool = False) -> None:
    """Raises a ValueError if the rows of a leaf cannot be split evenly over the devices.

    Args:
      batch: The global batch.
      devices: The number of devices with rows of their own.
      rows_differ: Whether leaves may differ in their number of rows.
    """
    listed = (
        " A list is a tree of leaves: pass an array, `jnp.asarray(rows)`."
        if isinstance(batch, list)
        else ""
    )
    first: tuple[str, int] | None = None
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        where = f"batch{jax.tree_util.keystr(path)}"
        if jnp.ndim(leaf) == 0:
            raise ValueError(
                f"`{where}` is a scalar; batch leaves are `[global_batch, ...]`. Pass what all "
                f"workers share as `step(..., shared=)`.{listed}"
            )
        rows = jnp.shape(leaf)[0]
        if rows == 0:
            raise ValueError(f"`{where}` holds no examples: the global batch must not be empty.")
        if rows % devices:
            more = -rows % devices
            padded = (
                f" Pad it, `jax.tree.map(lambda x: jnp.pad(x, [(0, {more})] + [(0, 0)] * (x.ndim - "
                "1)), batch)`, with a leaf of weights that are 0 for the added rows; or, if all "
                "workers need the whole array, pass it as `step(..., shared=)`."
            )
            raise ValueError(
                f"`{where}` has a global batch of {rows}, which is not divisible by {devices} "
                f"workers.{listed or padded}"
            )
        first = first or (where, rows)
        if rows != first[1] and not rows_differ:
            raise ValueError(
                f"`{where}` has {rows} rows, but `{first[0]}` has {first[1]}, and each worker gets "
                f"a part of both. If all workers need the whole array, pass it as `step(..., "
                "shared=)`, and `loss_fn` takes `shared`. If rows of several kinds belong "
                "together, such as nodes and edges of graphs, pass `rows_differ=True`."
            )


def require_global(batch: PyTree, mesh: Mesh) -> None:
    """Raises a ValueError if, on a mesh of several processes, a leaf is not an array over all."""
    if not mesh.is_multi_process:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            raise ValueError(
                f"`batch{jax.tree_util.keystr(path)}` must be an array over all processes of the "
                f"mesh, got a {type(leaf).__name__} of this process only: pass its rows to "
                "`jax.make_array_from_process_local_data`."
            )


_DESCRIPTIONS = Carry("The parameters", "The model state", "The optimizer state")


def require_carry(
    carry: Carry,
    sizes: Mapping[str, int],
    axis_name: AxisName,
    shard_axes: tuple[str, ...] | None = None,
) -> None:
    """Raises a ValueError if a tree is for other workers, or other axes than `shard_axes` shard it.

    Types say the latter. What types do not say, `place` sees.
    """
    names, specs = _axis.names(axis_name), state_specs(carry)
    of_loss = {"params": carry.params, "model_state": carry.model_state}
    differs = {name: [*x.per_worker] for name, x in of_loss.items() if isinstance(x, PerWorker)}
    for name, label in differs.items():
        if names[: len(axes := label[0].split(","))] != (*axes,):
            raise ValueError(
                f"`{name}` differs over the axes {label}, but `axis_name` is {axis_name!r}. It "
                f"must begin with the axes over which `{name}` differs."
            )
    if len(differs) == 2 and differs["params"] != differs["model_state"]:
        raise ValueError(
            f"`params` differs over the axes {differs['params']}, and `model_state` over "
            f"{differs['model_state']}: replicate both over the same axes."
        )
    if any(map(any, jax.tree.leaves(specs))):
        for tree, what in zip(carry, _DESCRIPTIONS, strict=True):
            require_workers(tree, sizes, what)
    for name, tree in of_loss.items():
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        for (path, x), spec in zip(leaves, jax.tree.leaves(getattr(specs, name)), strict=True):
            where = f"{name}{jax.tree_util.keystr(path)}"
            if any(spec) and name not in differs:
                raise ValueError(
                    f"`{where}` is in a `PerWorker`, but other leaves are not: either all or none "
                    f"differ by worker. Pass the whole {name.replace('_', ' ')} to "
                    "`jaxcomm.replicate`, such as `jaxcomm.replicate(loss_scaled(...), mesh)`."
                )
            sharding = None if shard_axes is None or any(spec) else explicit_sharding(x)
            if sharding is not None and not set(axes_in(sharding.spec)) <= set(shard_axes or ()):
                raise_sharded(where, sharding.spec)


def require_carry_kept(carry: Carry) -> None:
    """Raises a ValueError if an array has already been donated."""
    for name, tree in carry._asdict().items():
        require_kept(tree, name)


def public_step(
    run: Callable[..., tuple[Carry, dict[str, jax.Array]]], has_model_state: bool
) -> Step:
    """The step that users call, from `run(carry, given, extra_args) -> (carry, metrics)`."""

    def step(
        params: PyTree,
        opt_state: optax.OptState,
        batch: PyTree,
        *,
        key: jax.Array | None = None,
        shared: PyTree = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
        new, metrics = run(Carry(params, (), opt_state), Given(batch, key, shared), extra_args)
        return new.params, new.opt_state, metrics

    def step_with_model_state(
        params: PyTree,
        model_state: PyTree,
        opt_state: optax.OptState,
        batch: PyTree,
        *,
        key: jax.Array | None = None,
        shared: PyTree = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, PyTree, optax.OptState, dict[str, jax.Array]]:
        carry = Carry(params, model_state, opt_state)
        new, metrics = run(carry, Given(batch, key, shared), extra_args)
        return *new, metrics

    return step_with_model_state if has_model_state else step


def require_batch_axes(batch_axes: AxisName, shard_axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of shards that also split the batch; raises unless they are distinct ones."""
    axes = _axis.names(batch_axes)
    if len(set(axes)) < len(axes) or not set(axes) <= set(shard_axes):
        raise ValueError(
            f"`batch_axes` must name distinct axes of `shard_axes`={shard_axes!r}, got "
            f"{batch_axes!r}. Over all other axes of the mesh the batch is split in any case."
        )
    return axes


class Latest:
    """Recognizes the arrays that a step returned last, which need neither checks nor placing.

    It keeps weak references, so that arrays are freed when they are not used any more.
    """

    def __init__(self) -> None:
        self.keep((), known=False)

    def keep(self, tree: PyTree, known: bool) -> None:
        """Remembers the arrays of a tree; if those before were known, they had the same sizes."""
        leaves, structure = jax.tree.flatten(tree)
        self._structure: Any = structure
        self._arrays: list[Any] = [*map(weakref.ref, leaves)]
        if not known:
            self._sizes = {*map(bytes_of_shard, leaves)}

    def shares_nothing_with(self, tree: PyTree) -> bool:
        """Whether no array of another tree can have the buffer of one of these."""
        arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
        return self._sizes.isdisjoint(map(bytes_of_shard, arrays))

    def has(self, tree: PyTree) -> bool:
        """Whether a tree consists of these arrays, and none was donated since."""
        leaves, structure = jax.tree.flatten(tree)
        return bool(structure == self._structure) and all(
            kept() is x and not x.is_deleted() for kept, x in zip(self._arrays, leaves, strict=True)
        )


def place_carry(carry: Carry, mesh: Mesh, shard_axes: tuple[str, ...]) -> tuple[Carry, Carry]:
    """Places the trees on the mesh: `PerWorker` leaves over their axes, the rest replicated.

    Arrays that are sharded over `shard_axes` stay so. Returns the trees and their specs.
    """
    specs = kept_specs(carry, mesh, state_specs(carry), shard_axes)
    trees = zip(carry._asdict().items(), specs, strict=True)
    return Carry(*(place(tree, mesh, own, name) for (name, tree), own in trees)), specs


def _buffers(x: jax.Array) -> list[int]:
    """What identifies the buffers of an array on the devices of this process."""
    if x.is_fully_replicated and not x.is_fully_addressable:
        shards = [x.addressable_data(0)]  # `addressable_shards` fails after `jax.device_put`.
    else:
        shards = [shard.data for shard in x.addressable_shards]
    try:
        return [shard.unsafe_buffer_pointer() for shard in shards]
    except jax.errors.JaxRuntimeError:
        return [id(x)]  # A backend need not have pointers.


def bytes_of_shard(x: jax.Array) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def unshared(donated: PyTree, *others: PyTree, distinct: bool = False) -> PyTree:
    """`donated`, with copies of leaves that share a buffer with each other or with `others`.

    XLA refuses to donate such a buffer, on some devices only; the rest would wait for them forever,
    and so would the next program.

    Args:
      donated: What a program takes and overwrites.
      others: All else that it takes.
      distinct: Whether `donated` is the result of a program, so that its leaves share nothing with
        each other. Few buffers are then compared: those of the sizes of `others`.
    """
    kept = [x for x in jax.tree.leaves(others) if isinstance(x, jax.Array)]
    seen = {buffer for x in kept for buffer in _buffers(x)}
    sizes = {bytes_of_shard(x) for x in kept}

    def copy_shared(x: Any) -> Any:
        if not isinstance(x, jax.Array) or (distinct and bytes_of_shard(x) not in sizes):
            return x
        buffers = _buffers(x)
        if seen.isdisjoint(buffers):
            seen.update(buffers)
            return x
        if x.committed and x.is_fully_addressable:  # `copy` would write the spec in another way.
            return jax.device_put(x, x.sharding, may_alias=False)
        return x.copy()

    return jax.tree.map(copy_shared, donated)


def fits(x: Any, sharding: NamedSharding) -> bool:
    """Whether a program whose argument has this sharding takes `x` as it is."""
    return not isinstance(x, jax.Array) or not x.committed or x.sharding == sharding


def constrained(tree: PyTree, mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> PyTree:
    """The tree, whose leaves XLA shards as `specs` say, in order; without specs, as it chooses."""
    if not specs or mesh.axis_types != (AxisType.Auto,) * mesh.devices.ndim:
        return tree  # Types say how leaves are sharded over Explicit axes.
    leaves, structure = jax.tree.flatten(tree)
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    return jax.tree.unflatten(structure, [*map(lax.with_sharding_constraint, leaves, shardings)])


def sharded_as(tree: PyTree, mesh: Mesh, spec: PartitionSpec) -> PyTree:
    """The tree, whose leaves are sharded by one spec, over axes of any type."""
    sharding = NamedSharding(mesh, spec)
    explicit = AxisType.Explicit in mesh.axis_types
    over = jax.sharding.reshard if explicit else lax.with_sharding_constraint
    return jax.tree.map(lambda x: over(x, sharding), tree)


def typed_as(tree: PyTree, like: PyTree) -> PyTree:
    """`tree` with the shardings in the types of `like`, so that a loop can carry it.

    Only Explicit axes appear in types. A leaf that `like` lacks, or has with another number of
    dimensions, does not change.
    """
    types = {
        jax.tree_util.keystr(path): (explicit_sharding(x), jax.numpy.ndim(x))
        for path, x in jax.tree_util.tree_leaves_with_path(like)
    }

    def typed(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        sharding, ndim = types.get(jax.tree_util.keystr(path), (None, 0))
        if sharding is None or ndim != x.ndim:
            return x
        return jax.sharding.reshard(x, sharding)

    return jax.tree_util.tree_map_with_path(typed, tree)
