"""State and parameters of workers: initial ones, their specs, and those that differ by worker."""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PerWorker, PyTree, reports, require_state
from jaxcomm._mesh import (
    axes_in,
    is_traced,
    kept_specs,
    on_a_worker,
    over_workers_of,
    place,
    require_axes,
    require_kept,
    require_shard_axes,
    require_workers,
    restricted,
    retyped,
    shard_map,
    spec_on,
    specs_of_state,
    strong,
    tracing,
)
from jaxcomm._require import (
    checked,
    described,
    own_weight,
    require_axis_name,
    require_clips_of_the_mean,
    require_transformation,
)


def _children(node: Any) -> tuple[Any, ...]:
    if isinstance(node, Mapping):
        return tuple(node.values())
    return tuple(node) if isinstance(node, tuple | list) else ()


def require_exchange_last(state: Any, mixing: set[int]) -> None:
    """Raises if anything follows gossip or local steps in `optax.chain` or `optax.named_chain`.

    Their states are a plain tuple and an ordered dict. The update of these methods moves a worker
    to the mixed parameters, so a transformation of it mixes them wrongly.

    Args:
      state: The initial state.
      mixing: The identities of the states of gossip and local steps in it.
    """

    def mixes(node: Any) -> bool:
        return id(node) in mixing or any(map(mixes, _children(node)))

    if id(state) in mixing:
        return
    for node in _children(state):
        require_exchange_last(node, mixing)
    in_turn = type(state) in (tuple, OrderedDict)
    for node, after in itertools.pairwise(_children(state) if in_turn else ()):
        if mixes(node) and not mixes(after):
            raise ValueError(
                "Gossip or local steps must be last in `optax.chain`, since they average the "
                "parameters that the optimizer has moved: place other transformations before them."
            )


def worker_axes(workers: int | Mapping[str, int], axis_name: AxisName) -> dict[str, int]:
    """The simulated axes and their sizes, outermost first."""
    require_axis_name(axis_name)
    sizes = workers if isinstance(workers, Mapping) else {_axis.label(axis_name): workers}
    if any("," in name or not isinstance(size, int) or size < 1 for name, size in sizes.items()):
        raise ValueError(
            "The number of workers must be an int of at least 1, or a dict of sizes by axis, got "
            f"{described(workers)} for `axis_name`={axis_name!r}."
        )
    return dict(sizes)


def over_workers(
    fn: Callable[..., PyTree], axes: Mapping[str, int], in_specs: PyTree, out_specs: PyTree
) -> Callable[..., PyTree]:
    """`jax.shard_map` on one device: `fn` under one `jax.vmap` per axis.

    Sharded leaves are `[workers, ...]` outside, and `[1, ...]` inside `fn`.
    """

    def axes_of(spec: PartitionSpec) -> list[str]:
        return [*axes_in(PartitionSpec(*spec[:1]))]

    def split(spec: PartitionSpec, tree: PyTree) -> PyTree:
        sizes = [axes[name] for name in axes_of(spec)]
        rows = lambda x: x.shape[0] // math.prod(sizes)  # noqa: E731
        return jax.tree.map(lambda x: x.reshape(*sizes, rows(x), *x.shape[1:]), tree)

    def join(spec: PartitionSpec, tree: PyTree) -> PyTree:
        parts = len(axes_of(spec)) + 1
        # `reshape` cannot infer -1 for an empty array.
        return jax.tree.map(lambda x: x.reshape(math.prod(x.shape[:parts]), *x.shape[parts:]), tree)

    def of_split(change: Callable[..., PyTree], specs: PyTree, trees: PyTree) -> PyTree:
        return jax.tree.map(lambda spec, x: change(spec, x) if axes_of(spec) else x, specs, trees)

    def apply(*args: PyTree) -> PyTree:
        mapped = fn
        for number, name in reversed([*enumerate(axes)]):
            outer = [*axes][:number]  # Mapped already, so that they are dimensions no more.

            def dimension(
                spec: PartitionSpec, name: str = name, outer: list[str] = outer
            ) -> int | None:
                left = [other for other in axes_of(spec) if other not in outer]
                return left.index(name) if name in left else None

            mapped = jax.vmap(
                mapped,
                in_axes=jax.tree.map(dimension, in_specs),
                out_axes=jax.tree.map(dimension, out_specs),
                axis_name=name,
                axis_size=axes[name],
            )
        return of_split(join, out_specs, mapped(*of_split(split, in_specs, args)))

    return apply


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
    param_specs = _axis.state_specs(params)

    def first(params: PyTree) -> optax.OptState:
        with reports() as found:
            state = tx.init(_axis.own_params(params))
        mixing = {id(part) for each, part in found if each.kind in ("gossip", "local")}
        require_exchange_last(state, mixing)
        return state

    def structure(params: PyTree) -> PyTree:
        """Of the state, which is known only after tracing `tx.init` on the workers."""
        state = first(params)
        _axis.require_replicated(
            state,
            mesh.axis_names,
            "The optimizer state",
            "Mark it, as in `optax.chain(jaxcomm.per_worker(optax.adam(1e-3)), ...)`.",
        )
        return jax.tree.map(lambda x: 0, state)

    axes = dict(workers.shape) if isinstance(workers, Mesh) else worker_axes(workers, axis_name)
    mesh: Mesh | AbstractMesh = (
        workers
        if isinstance(workers, Mesh)
        else AbstractMesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))
    )
    require_workers(params, axes, "The parameters")
    require_kept(params, "params")
    if not isinstance(mesh, Mesh):
        specs = _axis.state_specs(on_a_worker(structure, mesh, (param_specs,), (params,)))
        simulated = over_workers(first, axes, (param_specs,), specs)
        return jax.jit(simulated)(jax.tree.map(strong, params))
    shards = require_shard_axes(mesh, (), shard_axes)
    placed = param_specs if is_traced(params) else kept_specs(params, mesh, param_specs, shards)
    with tracing(shards, params, jax.tree.leaves(placed)):
        specs = _axis.state_specs(on_a_worker(structure, mesh, (param_specs,), (params,), shards))
        run = shard_map(first, mesh, (param_specs,), specs, shards)
        if is_traced(params):
            return run(params)
        if shards:
            shapes = jax.eval_shape(run, params)
            specs = specs_of_state(shapes, specs, params, placed)
        out = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
        return jax.jit(run, out_shardings=out)(place(params, mesh, placed, "params"))


def replicate(
    params: PyTree, workers: Mesh | int | Mapping[str, int], *, axis_name: AxisName = "data"
) -> PerWorker:
    """Copies the parameters to each worker, so that workers can then differ.

    Args:
      params: Arrays. If they are sharded over other axes of the mesh, so are their copies.
      workers: A mesh; or, for :func:`jaxcomm.simulate`, a number of workers, or the sizes of
        several axes by name, outermost first.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      `PerWorker` with leaves `[workers, ...]`, for :func:`jaxcomm.init`, :func:`jaxcomm.make_step`
      and :func:`jaxcomm.simulate`. Nothing is sent except to place the copies.

    Raises:
      ValueError: If the mesh has no such axis, or the number of workers is not a positive int.

    Example:
      >>> import jax.numpy as jnp, jaxcomm
      >>> print(jaxcomm.replicate(jnp.ones(2), 3).per_worker["data"])
      [[1. 1.]
       [1. 1.]
       [1. 1.]]
    """
    axis = _axis.label(axis_name)
    if isinstance(workers, Mesh):
        require_axes(workers, axis_name)
        sizes = dict(workers.shape)
        mesh, lead = workers, PartitionSpec(_axis.names(axis_name))
        others = tuple(name for name in mesh.axis_names if name not in _axis.names(axis_name))

        def kept(x: Any) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*lead, *restricted(spec_on(mesh, x), others)))

        out = PerWorker({axis: jax.tree.map(kept, params)})
    else:
        sizes, out = worker_axes(workers, axis_name), None
    copies = math.prod(sizes[name] for name in _axis.names(axis_name))

    def copy(params: PyTree) -> PerWorker:
        own = jax.tree.map(lambda x: jnp.broadcast_to(x, (copies, *x.shape)), params)
        return PerWorker(
            {axis: jax.tree.map(retyped, own, *out.per_worker.values()) if out else own}
        )

    require_kept(params, "params")
    params = jax.tree.map(jnp.asarray, params)
    return cast(PerWorker, jax.jit(copy, out_shardings=out)(params) if out else copy(params))


def of_all(params: PerWorker) -> PyTree:
    """The leaves `[workers, ...]` of parameters that differ by worker."""
    require_kept(params, "params")
    (leaves,) = params.per_worker.values()
    return leaves


def mean_of_rows(x: jax.Array) -> jax.Array:
    """`[workers, ...] -> [...]`, in at least float32; exact if all rows are equal."""
    wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    return (wide[0] + jnp.mean(wide - wide[:1], axis=0)).astype(x.dtype)


def consensus(params: PerWorker) -> PyTree:
    r"""The mean of the workers' parameters, exact except for one rounding per coordinate.

    .. math:: \bar x = x_1 + \frac{1}{n} \sum_i (x_i - x_1)

    in at least float32. If all workers are equal, the result is bit-equal to their parameters. On
    a mesh this is one all-reduce. Leaves that have no mean, such as counters and keys of a model
    state, are those of the first worker.

    Args:
      params: Parameters that differ by worker, from :func:`jaxcomm.replicate` and training.

    Returns:
      Parameters without the leading axis of workers, with the same dtypes.

    Example:
      >>> import jax.numpy as jnp, jaxcomm
      >>> print(jaxcomm.consensus(jaxcomm.PerWorker({"data": jnp.array([[1.0], [4.0]])})))
      [2.5]
    """

    def mean(x: jax.Array) -> jax.Array:
        return mean_of_rows(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x[0]

    return jax.tree.map(lambda x: over_workers_of(mean, x), of_all(params))


def consensus_distance(params: PerWorker) -> jax.Array:
    r"""Squared distance of the workers from their mean, :math:`\sum_i \|x_i - \bar x\|^2`.

    It is exact and therefore costly: on a mesh it averages all parameters. A gossip step computes
    the distance between neighbors at no such cost, and reports it with `diagnostics=True`. Leaves
    that have no mean, such as counters and keys, do not count.

    Args:
      params: Parameters that differ by worker.

    Returns:
      float32[].

    Example:
      >>> import jax.numpy as jnp, jaxcomm
      >>> print(jaxcomm.consensus_distance(jaxcomm.PerWorker({"data": jnp.array([1.0, 4.0])})))
      4.5
    """

    def distance(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
        from_first = wide - wide[:1]
        from_mean = from_first - jnp.mean(from_first, axis=0, keepdims=True)
        return jnp.sum(jnp.square(from_mean.astype(jnp.float32)))

    leaves = [x for x in jax.tree.leaves(of_all(params)) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return sum((over_workers_of(distance, x) for x in leaves), jnp.float32(0))


@checked
def per_worker(
    tx: optax.GradientTransformation, *, axis_name: AxisName = "data"
) -> optax.GradientTransformationExtraArgs:
    """Marks the state of an optimizer as different by worker.

    If parameters differ by worker, so do the moments of an optimizer that gets local gradients. A
    step that would turn a finite value in the state into NaN or infinity does not change the state
    on this worker, since a NaN moment would stay NaN. It still returns the optimizer's update. A
    step of weight 0, a mean over no samples, does not change the state either, and its update is 0.
    A key in the state, such as that of `optax.add_noise`, stays equal on all workers. Nothing is
    sent.

    Args:
      tx: The optimizer.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      The same transformation, whose state is a `PerWorker` with leaves `[workers, ...]`.

    Raises:
      ValueError: In `init` and `update`, if `axis_name` is not bound; in `update`, if `weight` is
        not a scalar or is statically out of range.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> tx = jaxcomm.per_worker(optax.sgd(0.1, momentum=0.9))
      >>> jaxcomm.init(tx, jnp.zeros(3), 2).per_worker["data"][0].trace.shape
      (2, 3)
    """
    inner = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> PerWorker:
        return _axis.marked(inner.init(params), axis_name)

    def update_fn(
        updates: PyTree, state: PerWorker, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PerWorker]:
        require_state(state, PerWorker, "`per_worker`")
        before = _axis.own(state, axis_name)
        updates, after = inner.update(updates, before, params, **extra_args)
        weight = extra_args.get("weight")
        keep = jnp.ones((), bool) if weight is None else own_weight(weight) != 0
        updates = jax.tree.map(lambda u: jnp.where(keep, u, jnp.zeros((), u.dtype)), updates)
        for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
            if jnp.issubdtype(new.dtype, jnp.inexact):
                keep &= jnp.all(jnp.isfinite(new) | ~jnp.isfinite(old))
        after = jax.tree.map(lambda x, y: jnp.where(keep, x, y), after, before)
        return updates, _axis.marked(after, axis_name)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
