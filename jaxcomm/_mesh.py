"""Places arrays on a mesh, and runs functions on its devices, for any sharding and axis types."""

import contextlib
import contextvars
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PerWorker, PyTree

_SPECS: contextvars.ContextVar[Mapping[tuple[str, tuple[int, ...]], PartitionSpec]] = (
    contextvars.ContextVar("specs", default=MappingProxyType({}))
)


def of_one_worker(
    params: PyTree, specs: Sequence[PartitionSpec]
) -> list[tuple[tuple[Any, ...], tuple[int, ...], PartitionSpec]]:
    """Path, shape and spec of each parameter, as a worker sees them.

    Parameters that differ by worker have neither their mark nor their axis of workers there.
    """
    lead = 0
    if isinstance(params, PerWorker):
        ((_, params),) = params.per_worker.items()
        lead = 1
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [
        (path, jax.numpy.shape(x)[lead:], PartitionSpec(*spec[lead:]))
        for (path, x), spec in zip(leaves, specs, strict=False)
    ]


@contextlib.contextmanager
def tracing(
    axes: tuple[str, ...], params: PyTree = (), specs: Sequence[PartitionSpec] = ()
) -> Iterator[None]:
    """States, while a step is traced, which automatic axes shard the parameters.

    Args:
      axes: The axes.
      params: The parameters.
      specs: How they are sharded, leaf by leaf, if known.
    """
    found = {
        (jax.tree_util.keystr(path), shape): spec
        for path, shape, spec in of_one_worker(params, specs)
    }
    tokens = _axis.SHARDED_OVER.set(axes), _SPECS.set(found)
    try:
        yield
    finally:
        _axis.SHARDED_OVER.reset(tokens[0])
        _SPECS.reset(tokens[1])


def require_specs(path: tuple[Any, ...], shape: tuple[int, ...], spec: PartitionSpec) -> None:
    """Raises if the parameter at `path` is sharded, and not as `spec` says."""
    where = jax.tree_util.keystr(path)
    sizes = jax.sharding.get_abstract_mesh().shape
    over = tuple(name for name in _axis.automatic_axes() if sizes[name] > 1)
    actual = restricted(_SPECS.get().get((where, shape), PartitionSpec()), over)
    if axes_in(actual) and actual != restricted(spec, over):
        raise ValueError(
            f"`specs` has {spec} at {where or 'the root'}, but the parameter, sharded as {actual}, "
            "would be gathered: pass `jax.tree.map(lambda x: x.sharding.spec, params)`."
        )


def _names_in(entry: Any) -> tuple[str, ...]:
    if isinstance(entry, str):
        return (entry,)
    return tuple(entry) if isinstance(entry, tuple | list) else ()


def axes_in(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes of a spec, in its order."""
    return tuple(name for entry in spec for name in _names_in(entry))


def restricted(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """The spec without the axes that are not in `axes`."""

    def kept(entry: Any) -> Any:
        names = tuple(name for name in _names_in(entry) if name in axes)
        return names[0] if len(names) == 1 else names or None

    entries = [*map(kept, spec)]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def joined(first: PartitionSpec, second: PartitionSpec) -> PartitionSpec:
    """A spec that shards each axis as both do; `first` is the outer one."""
    entries = itertools.zip_longest(first, second)
    names = [(*_names_in(one), *_names_in(other)) for one, other in entries]
    return PartitionSpec(*(each[0] if len(each) == 1 else each or None for each in names))


def all_restricted(specs: PyTree, axes: tuple[str, ...]) -> PyTree:
    """`restricted` for a tree of specs."""
    return jax.tree.map(lambda spec: restricted(spec, axes), specs)


def spec_on(mesh: Mesh, x: Any) -> PartitionSpec:
    """How an array, or a `jax.ShapeDtypeStruct`, is sharded over `mesh`."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.shape_tuple != mesh.shape_tuple:
        return PartitionSpec()
    return sharding.spec


def explicit_spec_of(*shapes: jax.ShapeDtypeStruct) -> PartitionSpec | None:
    """How Explicit axes shard the first of `shapes` that they shard."""
    specs = [x.sharding.spec for x in shapes if isinstance(x.sharding, NamedSharding)]
    return next((spec for spec in specs if any(spec)), None)


def zeros_as(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros that Explicit axes shard as `shape`."""
    zeros, spec = jax.numpy.zeros(shape.shape, shape.dtype), explicit_spec_of(shape)
    return zeros if spec is None else jax.sharding.reshard(zeros, spec)


def specs_of_state(state: PyTree, base: PyTree, params: PyTree, param_specs: PyTree) -> PyTree:
    """The specs of optimizer state: a moment is sharded as its parameter.

    A moment has the shape of its parameter, after an axis of workers if it has one. Its path ends
    with the path of the parameter, and with the longest one if it ends with several.

    Args:
      state: The state of an optimizer.
      base: The specs of its leaves over the axes of workers.
      params: The parameters.
      param_specs: Their specs.
    """
    like = of_one_worker(params, jax.tree.leaves(param_specs))
    like.sort(key=lambda each: len(each[0]))

    def spec(path: tuple[Any, ...], x: Any, own: PartitionSpec) -> PartitionSpec:
        lead = len(own)  # PerWorker leaves have an axis of workers.
        found = [
            param_spec
            for end, shape, param_spec in like
            if x.shape[lead:] == shape and path[len(path) - len(end) :] == end
        ]
        if not found or set(axes_in(found[-1])) & set(axes_in(own)):
            return own  # A leaf that has a slice for each shard is sharded already.
        return PartitionSpec(*own, *found[-1])

    return jax.tree_util.tree_map_with_path(spec, state, base)


_REPLICATED = PartitionSpec()


def require_shard_axes(mesh: Mesh, axis_name: AxisName, shard_axes: AxisName) -> tuple[str, ...]:
    """The axes that shard parameters; raises unless `mesh` has them beside those of workers."""
    axes = _axis.names(shard_axes)
    if not set(axes) <= set(mesh.axis_names) - set(_axis.names(axis_name)):
        raise ValueError(
            f"`shard_axes` must name axes of the mesh, {mesh.axis_names}, other than those of the "
            f"workers, got {shard_axes!r}."
        )
    if axes and len(set(mesh.axis_types)) > 1:
        # A result with a type over some axes only would be gathered over the others.
        raise ValueError(
            "With `shard_axes`, the axes of the mesh must be all Auto or all Explicit, got "
            f"{mesh.axis_types}."
        )
    return axes


def require_axes(mesh: Mesh, axis_name: AxisName) -> None:
    """Raises unless `mesh` has these axes."""
    if missing := [name for name in _axis.names(axis_name) if name not in mesh.axis_names]:
        raise ValueError(
            f"The mesh with axes {mesh.axis_names} lacks {missing}: pass `axis_name=` one of its "
            "axes, here and to the transformation."
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
                f"{workers} here: use `jaxcomm.resize_workers(tx, opt_state, params, workers)`, or "
                "`jaxcomm.init` for a new state."
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


def raise_sharded(where: str, sharding: object) -> None:
    raise ValueError(
        f"{where} is sharded over devices, {sharding}, and would be gathered: replicate it; or "
        "name its axes in `shard_axes=`, with `jaxcomm.shard_local`; or, for axes of workers, use "
        "`jaxcomm.training.fully_sharded_value_and_grad`."
    )


def strong(x: Any) -> Any:
    """An array without a weak type: a result with a strong type would make `jax.jit` recompile."""
    if isinstance(x, jax.Array):
        return lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x
    return np.asarray(x)


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
            raise_sharded(f"{what}{jax.tree_util.keystr(path)}", x.sharding)
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


def is_traced(tree: PyTree) -> bool:
    """Whether a JAX transformation traces the tree, so that arrays must not be placed."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def explicit_sharding(x: Any) -> NamedSharding | None:
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
    options: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": check_vma}
    if shard_axes:
        manual = tuple(name for name in mesh.axis_names if name not in shard_axes)
        in_specs, out_specs = (all_restricted(specs, manual) for specs in (in_specs, out_specs))
        options |= {"in_specs": in_specs, "out_specs": out_specs, "axis_names": {*manual}}
    auto = mesh
    if isinstance(mesh, Mesh):
        auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)

    def reshard(spec: PartitionSpec, tree: PyTree) -> PyTree:
        def one(x: jax.Array) -> jax.Array:
            own = explicit_sharding(x) if shard_axes else None
            over = spec if own is None else joined(spec, restricted(own.spec, shard_axes))
            return jax.sharding.reshard(x, NamedSharding(mesh, over))

        return jax.tree.map(one, tree)

    def apply(*args: PyTree) -> PyTree:
        current = jax.sharding.get_abstract_mesh()
        if current.empty and not shard_axes and AxisType.Explicit in mesh.axis_types:
            leaves = jax.tree.leaves(args)
            if is_traced(leaves) and not all(explicit_sharding(x) is None for x in leaves):
                # A callback to the host fails in a program whose meshes differ in the types of
                # axes. If some axes are not manual, the loss would have to name them.
                with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                    return apply(*args)
        if current.empty or not current.explicit_axes:
            return jax.shard_map(fn, mesh=auto, **options)(*args)
        args = jax.tree.map(reshard, in_specs, args)
        return jax.shard_map(fn, mesh=mesh, **options)(*args)

    return apply


def on_a_worker(
    fn: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    in_specs: tuple[PyTree, ...],
    args: tuple[PyTree, ...],
    shard_axes: tuple[str, ...] = (),
    *,
    check_vma: bool = True,
) -> Any:
    """What `fn` returns while it is traced on a worker: any object, whose arrays have no values."""
    found: list[Any] = []

    def run(*args: PyTree) -> tuple[()]:
        found.append(fn(*args))
        return ()

    jax.eval_shape(shard_map(run, mesh, in_specs, (), shard_axes, check_vma=check_vma), *args)
    return found[0]


def over_workers_of(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`fn(x)` for leaves `[workers, ...]` of any type; the result is replicated."""
    sharding = explicit_sharding(x)
    if sharding is None:
        return fn(x)
    mesh = sharding.mesh
    replicated = NamedSharding(mesh, _REPLICATED)
    run = jax.sharding.auto_axes(fn, axes=mesh.explicit_axes, out_sharding=replicated)
    result: jax.Array = run(x)
    return result


def retyped(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """`x` with another sharding in its type, if Explicit axes appear there."""
    return x if explicit_sharding(x) is None else jax.sharding.reshard(x, sharding)


def is_all_manual() -> bool:
    """Whether all axes of the current mesh are manual, except axes of size 1."""
    current = jax.sharding.get_abstract_mesh()
    return all(size == 1 or name in current.manual_axes for name, size in current.shape.items())


def over_shards(
    fn: Callable[..., PyTree],
    axes: tuple[str, ...],
    in_specs: PyTree,
    out_specs: PyTree,
    axis_name: AxisName,
) -> Callable[..., PyTree]:
    """Runs `fn` on each device's shards of its arguments.

    Args:
      fn: A function that sends only over `axis_name`.
      axes: The automatic mesh axes that the specs name.
      in_specs: How the arguments are sharded over `axes`.
      out_specs: How the results are.
      axis_name: The axes that are manual already.
    """
    return jax.shard_map(
        fn,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes),
        check_vma=_axis.mode(_axis.names(axis_name)[0]) == "checked",
    )


def collective_switch(index: jax.Array, branches: Sequence[Callable[[], PyTree]]) -> PyTree:
    """Runs `branches[index]()` only, so that the other branches send nothing.

    Each result is typed as varying over all axes over which it varies in any branch. Over Explicit
    axes, it is sharded as in the first branch whose result is sharded.

    Args:
      index: int32[], equal on all workers. Otherwise some workers would wait for the others
        forever. An index out of range is clamped.
      branches: Functions that close over their operands, and return the same structure, shapes and
        dtypes.

    Raises:
      ValueError: If the index differs by worker (checked mode only).
    """
    if differs := sorted(_axis.varying(index)):
        raise ValueError(
            f"All workers must run the same branch, but the condition differs over {differs}: "
            "place `jaxcomm.accumulate`, and others that may skip a step, around `diloco` or "
            "`jaxcomm.per_worker`, and not inside."
        )

    def axes_of(*shapes: jax.ShapeDtypeStruct) -> frozenset[str]:
        types = [x.manual_axis_type for x in shapes]
        return frozenset().union(*(type_.varying for type_ in types if type_))

    shapes = [jax.tree.leaves(jax.eval_shape(branch)) for branch in branches]
    axes = [*map(axes_of, *shapes)]
    shardings = [*map(explicit_spec_of, *shapes)]

    def aligned(tree: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree)
        cast = [_axis.typed_over(x, one) for one, x in zip(axes, leaves, strict=True)]
        resharded = [
            x if sharding is None else jax.sharding.reshard(x, sharding)
            for x, sharding in zip(cast, shardings, strict=True)
        ]
        return jax.tree.unflatten(treedef, resharded)

    return lax.switch(index, [lambda run=run: aligned(run()) for run in branches])


def collective_cond(
    flag: jax.Array, run: Callable[[], PyTree], instead: Callable[[PyTree], PyTree]
) -> PyTree:
    """`run()` if `flag`, else `instead(shapes)` with the shapes and dtypes that `run` returns.

    Args:
      flag: bool[], equal on all workers.
      run: A function that closes over its operands.
      instead: A function that must not send.

    Raises:
      ValueError: If the flag differs by worker (checked mode only).
    """
    shapes = jax.eval_shape(run)
    return collective_switch(flag.astype(jnp.int32), [lambda: instead(shapes), run])
