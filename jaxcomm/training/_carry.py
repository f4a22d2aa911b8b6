"""What a step takes and returns changed: parameters, model state and optimizer state."""

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PerWorker, PyTree
from jaxcomm._mesh import (
    axes_in,
    explicit_sharding,
    kept_specs,
    place,
    raise_sharded,
    require_kept,
    require_marked,
    require_workers,
)
from jaxcomm._require import require_arrays
from jaxcomm._workers import state_specs

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


_DESCRIPTIONS = Carry("The parameters", "The model state", "The optimizer state")


def replica_axes(tree: PyTree, axis_name: AxisName) -> tuple[str, ...]:
    """The axes over which a tree differs; if it is no `PerWorker`, those of the workers."""
    if not isinstance(tree, PerWorker):
        return _axis.names(axis_name)
    (label,) = tree.per_worker
    return tuple(label.split(","))


def leads(axes: tuple[str, ...], axis_name: AxisName) -> bool:
    """Whether `axes` are the first of the axes of the workers."""
    return _axis.names(axis_name)[: len(axes)] == axes


def require_carry(carry: Carry, sizes: Mapping[str, int], axis_name: AxisName) -> None:
    """Raises a ValueError if a tree has leaves that are no arrays, or is for other workers."""
    for name, tree in (("params", carry.params), ("model_state", carry.model_state)):
        require_arrays(tree, name)
        require_marked(tree, name)
        if isinstance(tree, PerWorker) and not leads(replica_axes(tree, axis_name), axis_name):
            raise ValueError(
                f"`{name}` differs over the axes {[*tree.per_worker]}, but `axis_name` is "
                f"{axis_name!r}. It must begin with the axes over which `{name}` differs."
            )
    if isinstance(carry.params, PerWorker) and isinstance(carry.model_state, PerWorker):
        differs = [[*tree.per_worker] for tree in (carry.params, carry.model_state)]
        if differs[0] != differs[1]:
            raise ValueError(
                f"`params` differs over the axes {differs[0]}, and `model_state` over "
                f"{differs[1]}: replicate both over the same axes."
            )
    for path, _ in jax.tree_util.tree_leaves_with_path(carry.model_state):
        if _axis.per_worker_axes(path) and not isinstance(carry.model_state, PerWorker):
            raise ValueError(
                f"`model_state{jax.tree_util.keystr(path)}` is in a `PerWorker`, but other leaves "
                "are not: either all or none differ by worker. Pass the whole model state to "
                "`jaxcomm.replicate`, such as `jaxcomm.replicate(loss_scaled(...), mesh)`."
            )
    for tree, what in zip(carry, _DESCRIPTIONS, strict=True):
        require_workers(tree, sizes, what)


def require_carry_kept(carry: Carry) -> None:
    """Raises a ValueError if an array has already been donated."""
    for name, tree in carry._asdict().items():
        require_kept(tree, name)


def require_whole_carry(carry: Carry, shard_axes: tuple[str, ...]) -> None:
    """Raises a ValueError if types say that other axes shard parameters or model state."""
    for name, tree in (("params", carry.params), ("model_state", carry.model_state)):
        require_whole_types(tree, state_specs(tree), name, shard_axes)


def place_carry(carry: Carry, mesh: Mesh, shard_axes: tuple[str, ...]) -> tuple[Carry, Carry]:
    """Places the trees on the mesh: `PerWorker` leaves over their axes, the rest replicated.

    Arrays that are sharded over `shard_axes` stay so. Returns the trees and their specs.
    """
    specs = kept_specs(carry, mesh, state_specs(carry), shard_axes)
    trees = zip(carry._asdict().items(), specs, strict=True)
    return Carry(*(place(tree, mesh, own, name) for (name, tree), own in trees)), specs


def require_key(key: Any) -> None:
    """Raises unless `key` is one key, typed or of raw words, or None."""
    typed = jax.dtypes.prng_key
    is_typed = isinstance(key, jax.Array) and jax.numpy.issubdtype(key.dtype, typed)
    allowed = [()] if is_typed else [(2,), (4,)]  # Words of threefry, and of rbg.
    if key is not None and jax.numpy.shape(key) not in allowed:
        raise ValueError(
            "`key` must be one key for all workers, such as `jax.random.key(0)`, got "
            f"{f'{key.dtype}{list(key.shape)}' if isinstance(key, jax.Array) else repr(key)}."
        )


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
        require_key(key)
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
        require_key(key)
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


def require_whole_types(
    tree: PyTree, specs: PyTree, what: str, shard_axes: tuple[str, ...] = ()
) -> None:
    """Raises if the type of a leaf says that it is sharded over other axes than `shard_axes`."""

    def check(path: tuple[Any, ...], x: Any, spec: PartitionSpec) -> None:
        sharding = explicit_sharding(x)
        if sharding is None or spec != PartitionSpec():
            return
        if not set(axes_in(sharding.spec)) <= set(shard_axes):
            raise_sharded(f"{what}{jax.tree_util.keystr(path)}", sharding.spec)

    jax.tree_util.tree_map_with_path(check, tree, specs)


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
