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


def require_rows(batch: PyTree, rows_differ: bool = False) -> None:
    """Raises a ValueError if leaves of the batch have different numbers of rows.

    A leaf that all workers need, such as weights of classes, would be split over them.
    """
    rows = {
        jax.tree_util.keystr(path): jnp.shape(leaf)[:1]
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
    }
    if len({*rows.values()}) > 1 and not rows_differ:
        raise ValueError(
            f"Leaves of the batch have different numbers of rows, {rows}, and are split over the "
            "workers: pass what all need as `step(..., shared=)`, or make the step with "
            "`rows_differ=True`."
        )


def require_global(batch: PyTree, mesh: Mesh) -> None:
    """Raises a ValueError if, on a mesh of several processes, a leaf is not an array over all."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch) if mesh.is_multi_process else ():
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            raise ValueError(
                f"`batch{jax.tree_util.keystr(path)}` is of this process only: pass its rows to "
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
    for name, tree in (("params", carry.params), ("model_state", carry.model_state)):
        if isinstance(tree, PerWorker):
            if names[: len(axes := _axis.replica_axes(tree, ()))] != axes:
                raise ValueError(
                    f"`{name}` differs over the axes {list(axes)}, with which `axis_name`="
                    f"{axis_name!r} must begin."
                )
        elif any(map(any, jax.tree.leaves(getattr(specs, name)))):
            raise ValueError(
                f"Some leaves of `{name}` differ by worker and some do not: pass the whole of it "
                "to `jaxcomm.replicate`, such as `jaxcomm.replicate(loss_scaled(...), mesh)`."
            )
        elif shard_axes is not None:
            for path, x in jax.tree_util.tree_leaves_with_path(tree):
                sharding = explicit_sharding(x)
                if sharding is not None and not {*axes_in(sharding.spec)} <= {*shard_axes}:
                    raise_sharded(f"{name}{jax.tree_util.keystr(path)}", sharding.spec)
    if any(map(any, jax.tree.leaves(specs))):
        for tree, what in zip(carry, _DESCRIPTIONS, strict=True):
            require_workers(tree, sizes, what)


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
