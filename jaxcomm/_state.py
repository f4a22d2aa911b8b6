"""Initial state, and shardings derived from the state itself."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomm import _axis
from jaxcomm._base import AxisName, PerWorker, PyTree
from jaxcomm._clips import require_clips_of_the_mean
from jaxcomm._mesh import (
    is_traced,
    kept_specs,
    place,
    require_kept,
    require_marked,
    require_shard_axes,
    require_workers,
    shard_map,
    strong,
)
from jaxcomm._require import (
    described,
    explain_init_error,
    explained,
    require_arrays,
    require_axis_name,
    require_exchange_last,
    require_transformation,
)
from jaxcomm._sharded import is_spec, specs_of_state, tracing


def state_specs(state: PyTree) -> PyTree:
    """One `PartitionSpec` per leaf: `PerWorker` leaves over their axes, the rest replicated.

    Use it for `in_specs` and `out_specs` of `jax.shard_map`, or for the shardings of a checkpoint.
    Nothing is sent.

    Args:
      state: A tree of arrays or of `jax.ShapeDtypeStruct`; it may be a train state that contains
        the optimizer state.

    Returns:
      A tree of specs with the structure of `state`.

    Example:
      >>> import jax.numpy as jnp, jaxcomm
      >>> state = {
      ...     "step": jnp.int32(0),
      ...     "residual": jaxcomm.PerWorker({"data": jnp.zeros((8, 3))}),
      ... }
      >>> specs = jaxcomm.state_specs(state)
      >>> tuple(specs["step"]), tuple(specs["residual"].per_worker["data"])
      ((), ('data',))
    """

    def spec(path: tuple[Any, ...], leaf: object) -> PartitionSpec:
        del leaf
        axes = _axis.per_worker_axes(path)
        if not axes:
            return PartitionSpec()
        return PartitionSpec(axes[0] if len(axes) == 1 else axes)

    return jax.tree_util.tree_map_with_path(spec, state)


def worker_axes(workers: int | Mapping[str, int], axis_name: AxisName) -> dict[str, int]:
    """The simulated axes and their sizes, outermost first."""
    require_axis_name(axis_name)
    if isinstance(workers, Mesh):
        raise ValueError("The number of workers must be an int; on a mesh use `jaxcomm.make_step`.")
    sizes = dict(workers) if isinstance(workers, Mapping) else {_axis.label(axis_name): workers}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(
                f"The number of workers must be an int of at least 1, got {described(size)}."
            )
        if "," in name:
            raise ValueError(
                f"`axis_name`={axis_name!r} names several axes: pass a dict of their sizes instead "
                f"of {workers!r}, such as {{'dcn': 2, 'ici': 4}}."
            )
    return sizes


def over_workers(
    fn: Callable[..., PyTree], axes: Mapping[str, int], in_specs: PyTree, out_specs: PyTree
) -> Callable[..., PyTree]:
    """`jax.shard_map` on one device: `fn` under one `jax.vmap` per axis.

    Sharded leaves are `[workers, ...]` outside, and `[1, ...]` inside `fn`.
    """
    is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731

    def axes_of(spec: PartitionSpec) -> list[str]:
        first = spec[0] if spec else ()
        return [first] if isinstance(first, str) else list(first or ())

    def apply(*args: PyTree) -> PyTree:
        def split(spec: PartitionSpec, tree: PyTree) -> PyTree:
            # `reshape` uses the order of the spec, `jax.vmap` that of the axes.
            spec_axes = axes_of(spec)
            sizes = [axes[name] for name in spec_axes]
            order = [spec_axes.index(name) for name in axes if name in spec_axes]

            def split_leaf(x: jax.Array) -> jax.Array:
                parts = x.reshape(*sizes, x.shape[0] // math.prod(sizes), *x.shape[1:])
                return parts.transpose(*order, *range(len(order), parts.ndim))

            return jax.tree.map(split_leaf, tree) if spec_axes else tree

        def join(spec: PartitionSpec, tree: PyTree) -> PyTree:
            spec_axes = axes_of(spec)
            mapped_axes = [name for name in axes if name in spec_axes]
            order = [mapped_axes.index(name) for name in spec_axes]

            def join_leaf(x: jax.Array) -> jax.Array:
                parts = x.transpose(*order, *range(len(order), x.ndim))
                # `reshape` cannot infer -1 for an empty array.
                rows = math.prod(parts.shape[: len(order) + 1])
                return parts.reshape(rows, *parts.shape[len(order) + 1 :])

            return jax.tree.map(join_leaf, tree) if spec_axes else tree

        mapped = fn
        for name in reversed([*axes]):
            mapped_over = lambda specs, name=name: jax.tree.map(  # noqa: E731
                lambda spec: 0 if name in axes_of(spec) else None, specs, is_leaf=is_spec
            )
            mapped = jax.vmap(
                mapped,
                in_axes=mapped_over(in_specs),
                out_axes=mapped_over(out_specs),
                axis_name=name,
                axis_size=axes[name],
            )
        split_args = jax.tree.map(split, in_specs, args, is_leaf=is_spec)
        return jax.tree.map(join, out_specs, mapped(*split_args), is_leaf=is_spec)

    return apply


def own_params(params: PyTree) -> PyTree:
    """This worker's parameters, without the leading axis if they are `PerWorker`."""
    if not isinstance(params, PerWorker):
        return params
    (axes,) = params.per_worker
    return _axis.own(params, tuple(axes.split(",")), "The parameters")


def init(
    tx: optax.GradientTransformation,
    params: PyTree,
    workers: Mesh | int | Mapping[str, int],
    *,
    axis_name: AxisName = "data",
    shard_axes: AxisName = (),
) -> optax.OptState:
    """The initial state of `tx`, initialized on all workers and placed for them.

    `PerWorker` leaves are `[workers, ...]`, and each worker holds its slice. Other leaves are
    replicated. Nothing is sent.

    Args:
      tx: Any optax transformation.
      params: Arrays, or `jax.ShapeDtypeStruct` under `jax.eval_shape`. Parameters that differ by
        worker are `PerWorker`, from :func:`jaxcomm.replicate`.
      workers: A mesh; or, for :func:`jaxcomm.simulate`, a number of workers, or the sizes of
        several axes by name, outermost first.
      axis_name: The name of the axis, if `workers` is a number.
      shard_axes: The axes of the mesh over which parameters are sharded, as for
        :func:`jaxcomm.make_step`. Moments are sharded as their parameters: leaves with the shape of
        a parameter, and a path that ends with its path.

    Returns:
      The state that `tx.init` returns on the workers.

    Raises:
      ValueError: If the number of workers is not a positive int; if `tx` is not a transformation,
        or names an axis that is missing; if gossip or local steps are not last in a chain; if
        a clip or another transformation that is not linear comes before an aggregator; if
        state differs by worker and is not marked; or if `params` were made for another number of
        workers, or are sharded over other axes than `shard_axes`.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> tx = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.1, momentum=0.9))
      >>> state = jaxcomm.init(tx, jnp.zeros(3), 64)
      >>> print(state[1][0].trace)
      [0. 0. 0.]
    """
    require_transformation(tx)
    require_clips_of_the_mean(tx)
    structure: list[PyTree] = []
    param_specs = state_specs(params)

    def first(params: PyTree) -> optax.OptState:
        with explained(explain_init_error):
            state = tx.init(own_params(params))
        require_exchange_last(state)
        return state

    def record(params: PyTree) -> tuple[()]:
        # The structure of the state is known only after tracing `tx.init` on the workers.
        state = first(params)
        _axis.require_replicated(
            state,
            mesh.axis_names,
            "The optimizer state",
            "Mark it, as in `optax.chain(jaxcomm.per_worker(optax.adam(1e-3)), ...)`.",
        )
        structure.append(jax.tree.map(lambda x: 0, state))
        return ()

    axes = dict(workers.shape) if isinstance(workers, Mesh) else worker_axes(workers, axis_name)
    mesh: Mesh | AbstractMesh = (
        workers
        if isinstance(workers, Mesh)
        else AbstractMesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
    )
    require_arrays(params, "params")
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        raise ValueError(
            "`params` has leaves that are `jax.ShapeDtypeStruct`, which have no values. For the "
            "shapes of a state: `jax.eval_shape(lambda p: jaxcomm.init(tx, p, mesh), params)`."
        )
    require_marked(params)
    require_workers(params, axes, "The parameters")
    require_kept(params, "params")
    if not isinstance(mesh, Mesh):
        if shard_axes:
            raise ValueError("`shard_axes` needs a mesh: simulated workers have no such axes.")
        jax.eval_shape(shard_map(record, mesh, (param_specs,), ()), params)
        specs = state_specs(structure[0])
        simulated = over_workers(first, axes, (param_specs,), specs)
        return jax.jit(simulated)(jax.tree.map(strong, params))
    shards = require_shard_axes(mesh, (), shard_axes)
    placed = param_specs if is_traced(params) else kept_specs(params, mesh, param_specs, shards)
    with tracing(shards, params, jax.tree.leaves(placed, is_leaf=is_spec)):
        jax.eval_shape(shard_map(record, mesh, (param_specs,), (), shards), params)
        specs = state_specs(structure[0])
        run = shard_map(first, mesh, (param_specs,), specs, shards)
        if is_traced(params):
            return run(params)
        if shards:
            shapes = jax.eval_shape(run, params)
            specs = specs_of_state(shapes, specs, params, placed)
        out = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
        return jax.jit(run, out_shardings=out)(place(params, mesh, placed, "params"))
