"""Running on the devices of a mesh, whatever the types of its axes, and laying arrays out there."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomm import _axis
from jaxcomm._base import AxisName, PerWorker, PyTree

_REPLICATED = PartitionSpec()


def require_distinct(axis_name: AxisName) -> None:
    """Raises unless one axis is named at least, and none twice."""
    names = _axis.names(axis_name)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"`axis_name` must name one axis or several others, got {axis_name!r}.")


def require_axes(mesh: Mesh, axis_name: AxisName) -> None:
    """Raises unless `mesh` is one, and has the axes."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"`mesh` must be a `jax.sharding.Mesh`, got {mesh!r}. To simulate so many workers on "
            "one device use `jaxcomm.simulate`."
        )
    require_distinct(axis_name)
    if missing := [name for name in _axis.names(axis_name) if name not in mesh.axis_names]:
        raise ValueError(
            f"`axis_name`={axis_name!r} names {missing}, which the mesh with axes "
            f"{mesh.axis_names} does not have."
        )


def require_marked(params: PyTree) -> None:
    """Raises where parameters have a key that marks what differs by worker."""
    if isinstance(params, PerWorker):
        return
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        if any(getattr(key, "key", None) == "per_worker" for key in path):
            raise ValueError(
                f"The parameters at {jax.tree_util.keystr(path)} have the key 'per_worker', by "
                "which jaxcomm knows what differs by worker: rename it, or pass what "
                "`jaxcomm.replicate` makes."
            )


def require_workers(tree: PyTree, sizes: Mapping[str, int], what: str) -> None:
    """Raises where a `PerWorker` leaf is not of as many workers as there are."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        axes = _axis.per_worker_axes(path)
        if not axes or not set(axes) <= set(sizes):
            continue
        workers = math.prod(sizes[name] for name in axes)
        if not leaf.shape or leaf.shape[0] != workers:
            held = leaf.shape[0] if leaf.shape else "no"
            raise ValueError(
                f"{what} at {jax.tree_util.keystr(path)} is of {held} workers, and there are "
                f"{workers} here. What differs by worker belongs to as many workers as it was made "
                "for: start from `jaxcomm.init` with the new number."
            )


def require_kept(tree: PyTree, what: str) -> None:
    """Raises where an array has been donated already."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        if concrete and leaf.is_deleted():
            raise ValueError(
                f"{what}{jax.tree_util.keystr(path)} was donated to an earlier step: go on with "
                "what that step returned, or make the step with `donate=False`."
            )


def _refuse_cut(where: str, how: object) -> None:
    raise ValueError(
        f"{where} is cut over devices, {how}, and here every device holds all of it, which is not "
        "gathered in silence. Gather it yourself, `jax.device_put(x, NamedSharding(mesh, "
        "PartitionSpec()))`; or keep it cut, with `jaxcomm.shard_local` in a step of your own."
    )


def _require_whole(x: jax.Array, where: str) -> None:
    """Raises where an array is cut over devices that each have to hold all of it."""
    if not x.sharding.is_fully_replicated:
        _refuse_cut(where, x.sharding)


def require_whole_types(tree: PyTree, specs: PyTree, what: str) -> None:
    """Raises where the type of a leaf that is to be whole says that it is cut."""

    def check(path: tuple[Any, ...], x: Any, spec: PartitionSpec) -> None:
        sharding = _explicit(x)
        if spec == _REPLICATED and sharding is not None and any(sharding.spec):
            _refuse_cut(f"{what}{jax.tree_util.keystr(path)}", sharding.spec)

    jax.tree_util.tree_map_with_path(check, tree, specs)


def strong(x: Any) -> Any:
    """An array of no weak type: for what returns with a strong one, `jax.jit` compiles anew."""
    if isinstance(x, jax.Array):
        return lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x
    return np.asarray(x)


def unshared(*trees: PyTree) -> tuple[PyTree, ...]:
    """The trees with a copy wherever an array comes again: no buffer can be donated twice."""
    seen: set[int] = set()

    def own(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        if id(x) in seen:
            return x.copy()
        seen.add(id(x))
        return x

    return tuple(jax.tree.map(own, tree) for tree in trees)


def place(tree: PyTree, mesh: Mesh, specs: PyTree, what: str) -> PyTree:
    """The tree on the mesh; leaves that are there already are not copied.

    A single device is not a mesh of one: `jax.jit` would compile anew for what it returns.

    Raises:
      ValueError: If a leaf that is to be whole on each device is cut over devices.
    """

    def put(path: tuple[Any, ...], x: Any, spec: PartitionSpec) -> Any:
        sharding, x = NamedSharding(mesh, spec), strong(x)
        if not isinstance(x, jax.Array):
            return jax.device_put(x, sharding)
        if spec == _REPLICATED:
            _require_whole(x, f"{what}{jax.tree_util.keystr(path)}")
        there = isinstance(x.sharding, NamedSharding) and x.sharding.mesh == mesh
        if there and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        return jax.device_put(x, sharding)

    return jax.tree_util.tree_map_with_path(put, tree, specs)


def is_traced(tree: PyTree) -> bool:
    """Whether a transformation is looking, so that nothing may be placed or waited for."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _explicit(x: Any) -> NamedSharding | None:
    """The sharding in the type of `x`, where it has one."""
    sharding = jax.typeof(x).sharding
    return sharding if sharding.mesh.explicit_axes else None


def shard_map(
    fn: Callable[..., PyTree],
    mesh: Mesh | AbstractMesh,
    in_specs: tuple[PyTree, ...],
    out_specs: PyTree,
) -> Callable[..., PyTree]:
    """`jax.shard_map` of all axes, that takes arguments as they come.

    Over Explicit axes `jax.shard_map` refuses what is not cut as `in_specs` say. Here arguments are
    cut first where a mesh is set around; elsewhere the axes are taken as Auto, and JAX cuts.
    """
    auto = mesh
    if isinstance(mesh, Mesh):
        auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)

    def apply(*args: PyTree) -> PyTree:
        around = jax.sharding.get_abstract_mesh()
        if around.empty or not around.explicit_axes:
            return jax.shard_map(fn, mesh=auto, in_specs=in_specs, out_specs=out_specs)(*args)

        def cut(spec: PartitionSpec, tree: PyTree) -> PyTree:
            sharding = NamedSharding(mesh, spec)
            return jax.tree.map(lambda x: jax.sharding.reshard(x, sharding), tree)

        is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
        args = jax.tree.map(cut, in_specs, args, is_leaf=is_spec)
        return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(*args)

    return apply


def over_workers_of(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`fn(x)` of leaves `[workers, ...]`, whatever their type: whole on each device."""
    sharding = _explicit(x)
    if sharding is None:
        return fn(x)
    mesh = sharding.mesh
    whole = NamedSharding(mesh, _REPLICATED)
    run = jax.sharding.auto_axes(fn, axes=mesh.explicit_axes, out_sharding=whole)
    result: jax.Array = run(x)
    return result


def typed_as(tree: PyTree, given: PyTree) -> PyTree:
    """What comes out, with the types of what went in: a loop may carry it.

    Only Explicit axes show in types. Leaves that are new, or of another number of dimensions, stay
    as they are.
    """
    types = {
        jax.tree_util.keystr(path): (_explicit(x), jax.numpy.ndim(x))
        for path, x in jax.tree_util.tree_leaves_with_path(given)
    }

    def alike(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        sharding, ndim = types.get(jax.tree_util.keystr(path), (None, 0))
        if sharding is None or ndim != x.ndim:
            return x
        return jax.sharding.reshard(x, sharding)

    return jax.tree_util.tree_map_with_path(alike, tree)


def is_all_manual() -> bool:
    """Whether no axis of the mesh around is left to the compiler."""
    around = jax.sharding.get_abstract_mesh()
    return all(size == 1 or name in around.manual_axes for name, size in around.shape.items())
