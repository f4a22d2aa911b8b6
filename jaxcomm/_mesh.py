"""Running on the devices of a mesh, whatever the types of its axes, and laying arrays out there."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomm import _axis
from jaxcomm._base import AxisName, PyTree

_REPLICATED = PartitionSpec()


def require_axes(mesh: Mesh, axis_name: AxisName) -> None:
    """Raises unless `mesh` is one, and has the axes."""
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"`mesh` must be a `jax.sharding.Mesh`, got {mesh!r}. To simulate so many workers on "
            "one device use `jaxcomm.simulate`."
        )
    if missing := [name for name in _axis.names(axis_name) if name not in mesh.axis_names]:
        raise ValueError(
            f"`axis_name`={axis_name!r} names {missing}, which the mesh with axes "
            f"{mesh.axis_names} does not have."
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


def _require_whole(x: jax.Array, where: str) -> None:
    """Raises where an array is cut over devices that each have to hold all of it."""
    if x.sharding.is_fully_replicated:
        return
    raise ValueError(
        f"{where} is cut over devices, {x.sharding}, and here every device holds all of it, which "
        "is not gathered in silence. Gather it yourself, `jax.device_put(x, NamedSharding(mesh, "
        "PartitionSpec()))`; or keep it cut, with `jaxcomm.shard_local` in a step of your own."
    )


def place(tree: PyTree, mesh: Mesh, specs: PyTree, what: str) -> PyTree:
    """The tree on the mesh; leaves that are there already are not copied.

    A single device is not a mesh of one: `jax.jit` would compile anew for what it returns.

    Raises:
      ValueError: If a leaf that is to be whole on each device is cut over devices.
    """

    def put(path: tuple[Any, ...], x: Any, spec: PartitionSpec) -> Any:
        sharding = NamedSharding(mesh, spec)
        if not isinstance(x, jax.Array):
            return jax.device_put(np.asarray(x), sharding)
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
