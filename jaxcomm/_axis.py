"""How mesh axes are bound, what types say about them, and what differs by worker.

The three modes are `"checked"` (`jax.shard_map` with `check_vma=True`: a value's type lists the
axes over which it varies), `"unchecked"` (`check_vma=False`) and `"vmap"` (the simulator,
`jax.vmap(axis_name=...)`). Only this module and the collectives distinguish them.
"""

import contextvars
import functools
import math
from typing import Any, Literal, cast

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jaxcomm._contract import AxisName, PerWorker, PyTree
from pallas_kernels._dispatch import target

Mode = Literal["checked", "unchecked", "vmap"]

BACKWARD: contextvars.ContextVar[Any] = contextvars.ContextVar("backward", default=None)
"""The backward pass that a transformation of the traced step may run, if any."""

SHARDED_OVER: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "sharded_over", default=()
)
"""The automatic axes that shard the parameters of the traced step."""


def names(axis_name: AxisName) -> tuple[str, ...]:
    """The axis names as a tuple, outermost first."""
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def label(axis_name: AxisName) -> str:
    """The axis names joined by commas, the key of `PerWorker`."""
    return ",".join(names(axis_name))


def varying(x: jax.Array) -> frozenset[str]:
    """The axes over which the type of `x` varies; empty except in checked mode."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def index(axis_name: AxisName) -> jax.Array:
    """This worker's index, int32[]; the first axis varies slowest."""
    try:
        return lax.axis_index(names(axis_name))
    except NameError as error:
        bound = sorted(manual())
        where = f"where the axes are {bound}: pass `axis_name={bound[0]!r}`, or" if bound else "so"
        raise ValueError(
            f"`axis_name`={axis_name!r} is not bound here, {where} use `jaxcomm.make_step`, "
            "`jaxcomm.simulate` or `jax.shard_map` over it, and `jaxcomm.init`; to a framework "
            "give `tx._replace(init=lambda params: jaxcomm.init(tx, params, mesh))`."
        ) from error


def is_bound(axis_name: AxisName) -> bool:
    """Whether `axis_name` is bound, so that collectives over it are possible."""
    try:
        lax.axis_index(names(axis_name))
    except NameError:
        return False
    return True


def size(axis_name: AxisName) -> int:
    """The number of workers, static."""
    index(axis_name)
    return math.prod([lax.axis_size(name) for name in names(axis_name)])


def mode(name: str) -> Mode:
    """The mode in which the axis is bound."""
    if name in varying(index(name)):
        return "checked"
    if name in manual():
        return "unchecked"
    return "vmap"


def manual() -> frozenset[str]:
    """The axes over which each device runs the program by itself; empty under `jax.vmap`."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def local_params(params: PyTree, *, axis_name: AxisName = "data") -> PyTree:
    r"""Types parameters as varying by worker, so that their gradient stays local.

    Inside `jax.shard_map`, :func:`jax.grad` with respect to replicated parameters returns the *sum*
    :math:`\sum_i \nabla f_i` over workers, because JAX inserts a sum. With respect to
    `local_params(params)` it returns this worker's :math:`\nabla f_i`. Values do not change, and
    nothing is sent. Where JAX inserts no sum (`check_vma=False`, `jax.vmap`), it is the identity.

    Args:
      params: Any tree of arrays.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      The same tree, typed as varying over `axis_name`.

    Raises:
      ValueError: If `axis_name` is not bound.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> def gradient(w, x):
      ...     return jax.grad(lambda w: w * x)(jaxcomm.local_params(w))
      >>> print(
      ...     jax.vmap(gradient, (None, 0), axis_name="data")(
      ...         jnp.float32(0), jnp.array([1.0, 4.0])
      ...     )
      ... )
      [1. 4.]
    """
    checked = frozenset([name for name in names(axis_name) if mode(name) == "checked"])
    return jax.tree.map(functools.partial(typed_over, axes=checked), params)


def typed_over(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """`x` typed as varying over `axes` too."""
    missing = tuple(sorted(axes - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def _equal_over(
    tree: PyTree, over: tuple[str, ...], *, typed: bool = False
) -> list[tuple[str, list[str]]]:
    """Where leaves do not vary over some of the axes that types name, or of all if `typed`."""
    axes = {name for name in over if typed or mode(name) == "checked"}
    return [
        (jax.tree_util.keystr(path) or "the root", equal)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
        if (equal := sorted(axes - varying(x)))
    ]


def require_local(updates: PyTree, axis_name: AxisName, outer_axes: tuple[str, ...] = ()) -> None:
    """Raises unless each update varies over exactly the axes of `axis_name`.

    It may also vary over `outer_axes`, which the caller handles. Only checked mode can detect a
    mistake, and a step whose backward pass a transformation runs; in other modes gradients are
    local unless the user has reduced them.
    """
    wanted = names(axis_name)
    # Only a transformation that has run the backward pass knows this, and has averaged gradients.
    are_averaged = hasattr(BACKWARD.get(), "finite")
    for where, missing in _equal_over(updates, wanted, typed=are_averaged):
        raise ValueError(
            f"The update at {where} does not vary over {missing}: it has been summed already. Use "
            "`jaxcomm.local_value_and_grad` in `jax.shard_map`, one aggregator only, and "
            "`jaxcomm.accumulate(tx, k)` in place of `optax.MultiSteps(tx, k)`."
        )
    for path, x in jax.tree_util.tree_leaves_with_path(updates):
        if others := sorted(varying(x) - {*wanted, *outer_axes}):
            raise ValueError(
                f"The update at {jax.tree_util.keystr(path) or 'the root'} varies over {others} as "
                f"well, which `axis_name`={axis_name!r} lacks: sum it over them first, or name all."
            )


def require_own(params: PyTree, axis_name: AxisName) -> None:
    """Raises if parameters are the same on all workers (checked mode only)."""
    for where, missing in _equal_over(params, names(axis_name)):
        raise ValueError(
            f"The parameters at {where} do not differ by worker over {missing}, so there is "
            "nothing to mix. Start from `jaxcomm.replicate(params, mesh)`."
        )


def require_replicated(tree: PyTree, axis_name: AxisName, what: str, remedy: str) -> None:
    """Raises if a leaf differs over axes for which it has no `PerWorker` (checked mode only)."""
    over = {*names(axis_name)}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if differs := sorted(varying(x) & over - {*per_worker_axes(path)}):
            raise ValueError(
                f"{what} at {jax.tree_util.keystr(path) or 'the root'} differs by worker over "
                f"{differs}. {remedy}"
            )


def is_known_equal(tree: PyTree, axis_name: AxisName) -> bool:
    """Whether the types prove that all workers have the same values; only checked mode can."""
    if any(mode(name) != "checked" for name in names(axis_name)):
        return False
    return not any(varying(x) & set(names(axis_name)) for x in jax.tree.leaves(tree))


def per_worker_axes(path: tuple[object, ...]) -> tuple[str, ...]:
    """The axes of the `PerWorker` on the path to a leaf; empty if there is none."""

    def name(key: object) -> object:
        return getattr(key, "name", None) or getattr(key, "key", None)

    keys = [name(key) for key in path]
    if "per_worker" not in keys[:-1]:
        return ()
    return tuple(str(keys[keys.index("per_worker") + 1]).split(","))


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

    def spec(path: tuple[object, ...], leaf: object) -> PartitionSpec:
        del leaf
        axes = per_worker_axes(path)
        if not axes:
            return PartitionSpec()
        return PartitionSpec(axes[0] if len(axes) == 1 else axes)

    return jax.tree_util.tree_map_with_path(spec, state)


def marked(tree: PyTree, axis_name: AxisName) -> PerWorker:
    """Marks this worker's values as different by worker, with a leading axis of 1 and in types.

    A state whose first values are typed so can be the carry of a loop inside `jax.shard_map`.
    """
    if jax.tree.leaves(tree):  # An empty memory needs no bound axis.
        tree = local_params(tree, axis_name=axis_name)
    return PerWorker({label(axis_name): jax.tree.map(lambda x: x[None], tree)})


def own(tree: PerWorker, axis_name: AxisName, what: str = "The state") -> PyTree:
    """The inverse of `marked`: the leaves without their leading axis of 1.

    Raises:
      ValueError: If the tree was made for another number of workers. A worker that holds several
        slices must not use only the first of them.
    """
    workers = size(axis_name)

    def take(path: tuple[object, ...], x: jax.Array) -> jax.Array:
        slices = x.shape[0] if x.ndim else 0
        if slices != 1:
            raise ValueError(
                f"{what} at {jax.tree_util.keystr(path) or 'the root'} is for {slices * workers} "
                f"workers, but there are {workers} over {label(axis_name)!r}: use "
                "`jaxcomm.resize_workers(tx, opt_state, params, workers)`; or, if each worker "
                "received the whole array, `jaxcomm.state_specs(state)` as specs of "
                "`jax.shard_map`."
            )
        return x[0]

    return jax.tree_util.tree_map_with_path(take, tree.per_worker[label(axis_name)])


def replica_axes(tree: PyTree, axis_name: AxisName) -> tuple[str, ...]:
    """The axes over which a tree differs; if it is no `PerWorker`, those of the workers."""
    if not isinstance(tree, PerWorker):
        return names(axis_name)
    (axes,) = tree.per_worker
    return tuple(axes.split(","))


def own_params(params: PyTree) -> PyTree:
    """This worker's parameters, without the leading axis if they are `PerWorker`."""
    if not isinstance(params, PerWorker):
        return params
    return own(params, replica_axes(params, ()), "The parameters")


def is_simulated(axis_name: AxisName) -> bool:
    """Whether `jax.vmap` binds an axis, so that nothing is sent over it."""
    return any(mode(name) == "vmap" for name in names(axis_name))


def varying_like(x: jax.Array, tree: PyTree) -> jax.Array:
    """`x` typed as varying over all axes over which `tree` varies, for the carry of a loop."""
    return typed_over(x, frozenset().union(*[varying(leaf) for leaf in jax.tree.leaves(tree)]))


def as_varying(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """`x` typed as varying over `axis_name`; the identity except in checked mode."""
    return cast(jax.Array, local_params(x, axis_name=axis_name))


def automatic_axes() -> tuple[str, ...]:
    """The axes that shard the parameters of the traced step, except those that are manual here."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple([name for name in SHARDED_OVER.get() if name not in manual])


def require_shards() -> None:
    """Raises in a step whose parameters are sharded, except on their shards.

    Flat buckets of whole leaves would make the partitioner gather the shards.
    """
    if axes := [*automatic_axes()]:
        raise ValueError(
            f"The parameters are sharded over {axes}, and this transformation would gather them: "
            "wrap it, `jaxcomm.shard_local(tx, jax.tree.map(lambda x: x.sharding.spec, params))`."
        )


def by_gloo() -> bool:
    """Whether JAX moves arrays between processes on CPUs with Gloo, its default there."""
    implementation = jax.config.jax_cpu_collectives_implementation
    return jax.process_count() > 1 and target().platform == "cpu" and implementation == "gloo"
