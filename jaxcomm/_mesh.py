"""Places arrays on a mesh and runs functions on its devices, for any axis types."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomm import _axis
from jaxcomm._base import AxisName, PerWorker, PyTree
from jaxcomm._require import require_axis_name
from jaxcomm._sharded import all_restricted, axes_in, is_spec, joined, restricted, spec_on

_REPLICATED = PartitionSpec()


def require_shard_axes(mesh: Mesh, axis_name: AxisName, shard_axes: AxisName) -> tuple[str, ...]:
    """The axes that shard parameters; raises unless `mesh` has them beside those of workers."""
    axes = _axis.names(shard_axes)
    valid = len(set(axes)) == len(axes) and set(axes) <= set(mesh.axis_names)
    if not valid or set(axes) & set(_axis.names(axis_name)):
        raise ValueError(
            f"`shard_axes` must name distinct axes of the mesh, {mesh.axis_names}, other than "
            f"those of the workers, got {shard_axes!r}."
        )
    if axes and len(set(mesh.axis_types)) > 1:
        # A result with a type over some axes only would be gathered over the others.
        raise ValueError(
            "With `shard_axes`, the axes of the mesh must be all Auto or all Explicit, got "
            f"{mesh.axis_types}."
        )
    return axes


def require_batch_axes(batch_axes: AxisName, shard_axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of shards that also split the batch; raises unless they are distinct ones."""
    axes = _axis.names(batch_axes)
    if len(set(axes)) < len(axes) or not set(axes) <= set(shard_axes):
        raise ValueError(
            f"`batch_axes` must name distinct axes of `shard_axes`={shard_axes!r}, got "
            f"{batch_axes!r}. Over all other axes of the mesh the batch is split in any case."
        )
    return axes


def require_axes(mesh: Mesh, axis_name: AxisName) -> None:
    """Raises unless `mesh` is a mesh with these axes."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"`mesh` must be a `jax.sharding.Mesh`, got {mesh!r}. To simulate several workers on "
            "one device, use `jaxcomm.simulate`."
        )
    require_axis_name(axis_name)
    if missing := [name for name in _axis.names(axis_name) if name not in mesh.axis_names]:
        raise ValueError(
            f"`axis_name`={axis_name!r} names {missing}, which the mesh with axes "
            f"{mesh.axis_names} does not have: pass `axis_name=` one of them, here and to the "
            "transformation."
        )


def require_marked(params: PyTree, what: str = "params") -> None:
    """Raises if a tree, or what is in its `PerWorker`, has the reserved key 'per_worker'."""
    (own,) = params.per_worker.values() if isinstance(params, PerWorker) else (params,)
    marked = lambda node: isinstance(node, PerWorker)  # noqa: E731
    for path, _ in jax.tree_util.tree_leaves_with_path(own, is_leaf=marked):
        if "per_worker" in {getattr(key, "key", getattr(key, "name", None)) for key in path}:
            raise ValueError(
                f"`{what}{jax.tree_util.keystr(path)}` has the key 'per_worker', by which "
                "jaxcomm finds values that differ by worker, as `jaxcomm.replicate` returns them: "
                "rename it."
            )


def require_workers(tree: PyTree, sizes: Mapping[str, int], what: str) -> None:
    """Raises if a `PerWorker` leaf was made for another number of workers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        axes = _axis.per_worker_axes(path)
        if not axes or not set(axes) <= set(sizes):
            continue
        workers = math.prod(sizes[name] for name in axes)
        if not leaf.shape or leaf.shape[0] != workers:
            slices = leaf.shape[0] if leaf.shape else "no"
            raise ValueError(
                f"{what} at {jax.tree_util.keystr(path)} is for {slices} workers, but there are "
                f"{workers} here. Values that differ by worker are tied to the number of workers "
                "they were made for: call `jaxcomm.resize_workers(tx, opt_state, params, "
                "workers)`, or `jaxcomm.init` for a new state."
            )


def require_kept(tree: PyTree, what: str) -> None:
    """Raises if an array has already been donated."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        if concrete and leaf.is_deleted():
            raise ValueError(
                f"{what}{jax.tree_util.keystr(path)} was donated to an earlier step: use the "
                "arrays which that step returned, or make the step with `donate=False`."
            )


def _raise_sharded(where: str, sharding: object) -> None:
    raise ValueError(
        f"{where} is sharded over devices, {sharding}, but here it must be replicated, and jaxcomm "
        "does not gather it implicitly. Replicate it with `jax.device_put(x, NamedSharding(mesh, "
        "PartitionSpec()))`; or keep it sharded over axes other than those of the workers, name "
        "these axes in `shard_axes=`, and wrap the aggregator in `jaxcomm.shard_local`. For "
        "parameters that are sharded over the axes of the workers, use "
        "`jaxcomm.training.fully_sharded_value_and_grad`."
    )


def require_whole_types(
    tree: PyTree, specs: PyTree, what: str, shard_axes: tuple[str, ...] = ()
) -> None:
    """Raises if the type of a leaf says that it is sharded over other axes than `shard_axes`."""

    def check(path: tuple[Any, ...], x: Any, spec: PartitionSpec) -> None:
        sharding = _explicit(x)
        if sharding is None or spec != _REPLICATED:
            return
        if not set(axes_in(sharding.spec)) <= set(shard_axes):
            _raise_sharded(f"{what}{jax.tree_util.keystr(path)}", sharding.spec)

    jax.tree_util.tree_map_with_path(check, tree, specs)


def strong(x: Any) -> Any:
    """An array without a weak type: a result with a strong type would make `jax.jit` recompile."""
    if isinstance(x, jax.Array):
        return lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x
    return np.asarray(x)


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


def kept_specs(tree: PyTree, mesh: Mesh, specs: PyTree, shard_axes: tuple[str, ...]) -> PyTree:
    """The specs; or those of the arrays, if these are also sharded, but only over `shard_axes`."""

    def kept(x: Any, spec: PartitionSpec) -> PartitionSpec:
        own = restricted(spec_on(mesh, x), mesh.axis_names)  # As compiled programs return them.
        is_kept = restricted(own, shard_axes) != _REPLICATED and (
            restricted(own, tuple(set(mesh.axis_names) - set(shard_axes))) == spec
        )
        return own if is_kept else spec

    return jax.tree.map(kept, tree, specs) if shard_axes else specs


def place(tree: PyTree, mesh: Mesh, specs: PyTree, what: str) -> PyTree:
    """Places the tree on the mesh; leaves that already have the right sharding are not copied.

    An array on a single device is placed on a mesh of one device too. Otherwise `jax.jit` would
    recompile for the arrays that it returns.

    Raises:
      ValueError: If a leaf that must be replicated is sharded over devices.
    """

    def put(path: tuple[Any, ...], x: Any, spec: PartitionSpec) -> Any:
        sharding, x = NamedSharding(mesh, spec), strong(x)
        if not isinstance(x, jax.Array):
            return jax.device_put(x, sharding)
        if spec == _REPLICATED and not x.sharding.is_fully_replicated:
            _raise_sharded(f"{what}{jax.tree_util.keystr(path)}", x.sharding)
        on_mesh = isinstance(x.sharding, NamedSharding) and x.sharding.mesh == mesh
        if on_mesh and x.sharding.is_equivalent_to(sharding, x.ndim):
            # Another spec of the same sharding would make `jax.jit` compile again.
            return jax.device_put(x, sharding) if any(spec) and spec_on(mesh, x) != spec else x
        if mesh.is_multi_process and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            # `jax.device_put` cannot place a key on devices of other processes.
            data = jax.device_put(jax.random.key_data(x), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return jax.device_put(x, sharding)

    return jax.tree_util.tree_map_with_path(put, tree, specs)


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


def is_traced(tree: PyTree) -> bool:
    """Whether a JAX transformation traces the tree, so that arrays must not be placed."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _explicit(x: Any) -> NamedSharding | None:
    """The sharding in the type of `x`, or `None` if it has no Explicit axes."""
    sharding = jax.typeof(x).sharding
    return sharding if sharding.mesh.explicit_axes else None


def shard_map(
    fn: Callable[..., PyTree],
    mesh: Mesh | AbstractMesh,
    in_specs: tuple[PyTree, ...],
    out_specs: PyTree,
    shard_axes: tuple[str, ...] = (),
    *,
    check_vma: bool = True,
) -> Callable[..., PyTree]:
    """`jax.shard_map` over all axes except `shard_axes`, for arguments of any sharding.

    Over Explicit axes, `jax.shard_map` rejects arguments that are not sharded as in `in_specs`.
    This function reshards the arguments first if a mesh with Explicit axes is set; it sets one for
    traced arguments, if all axes are manual. Otherwise it treats the axes as Auto, and JAX
    reshards. How arguments are sharded over `shard_axes` does not change.
    """
    manual = tuple(name for name in mesh.axis_names if name not in shard_axes)
    in_specs, out_specs = (all_restricted(specs, manual) for specs in (in_specs, out_specs))
    options: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs}
    options["check_vma"] = check_vma
    if shard_axes:
        options["axis_names"] = set(manual)
    auto = mesh
    if isinstance(mesh, Mesh):
        auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)

    def typed(x: Any) -> bool:
        sharding = _explicit(x)
        return sharding is not None and AxisType.Explicit in mesh.axis_types

    def apply(*args: PyTree) -> PyTree:
        current = jax.sharding.get_abstract_mesh()
        is_typed = is_traced(args) and any(map(typed, jax.tree.leaves(args)))
        if current.empty and is_typed and not shard_axes:
            # A callback to the host fails in a program whose meshes differ in the types of axes.
            # If some axes are not manual, the loss would have to name them in its operations.
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return apply(*args)
        if current.empty or not current.explicit_axes:
            return jax.shard_map(fn, mesh=auto, **options)(*args)

        def reshard(spec: PartitionSpec, tree: PyTree) -> PyTree:
            def one(x: jax.Array) -> jax.Array:
                sharding = _explicit(x)
                own = _REPLICATED if sharding is None else restricted(sharding.spec, shard_axes)
                return jax.sharding.reshard(x, NamedSharding(mesh, joined(spec, own)))

            return jax.tree.map(one, tree)

        args = jax.tree.map(reshard, in_specs, args, is_leaf=is_spec)
        return jax.shard_map(fn, mesh=mesh, **options)(*args)

    return apply


def over_workers_of(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`fn(x)` for leaves `[workers, ...]` of any type; the result is replicated."""
    sharding = _explicit(x)
    if sharding is None:
        return fn(x)
    mesh = sharding.mesh
    replicated = NamedSharding(mesh, _REPLICATED)
    run = jax.sharding.auto_axes(fn, axes=mesh.explicit_axes, out_sharding=replicated)
    result: jax.Array = run(x)
    return result


def typed_as(tree: PyTree, like: PyTree) -> PyTree:
    """`tree` with the shardings in the types of `like`, so that a loop can carry it.

    Only Explicit axes appear in types. A leaf that `like` lacks, or has with another number of
    dimensions, does not change.
    """
    types = {
        jax.tree_util.keystr(path): (_explicit(x), jax.numpy.ndim(x))
        for path, x in jax.tree_util.tree_leaves_with_path(like)
    }

    def typed(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        sharding, ndim = types.get(jax.tree_util.keystr(path), (None, 0))
        if sharding is None or ndim != x.ndim:
            return x
        return jax.sharding.reshard(x, sharding)

    return jax.tree_util.tree_map_with_path(typed, tree)


def retyped(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """`x` with another sharding in its type, if Explicit axes appear there."""
    return x if _explicit(x) is None else jax.sharding.reshard(x, sharding)


def is_all_manual() -> bool:
    """Whether all axes of the current mesh are manual, except axes of size 1."""
    current = jax.sharding.get_abstract_mesh()
    return all(size == 1 or name in current.manual_axes for name, size in current.shape.items())
