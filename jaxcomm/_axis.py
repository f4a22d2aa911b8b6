"""How mesh axes are bound, what types say about them, and what differs by worker.

The three modes are `"checked"` (`jax.shard_map` with `check_vma=True`: a value's type lists the
axes over which it varies), `"unchecked"` (`check_vma=False`) and `"vmap"` (the simulator,
`jax.vmap(axis_name=...)`). Only this module and the collectives distinguish them.
"""

import contextvars
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, cast

import jax
import jax.extend.core
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
        raise unbound(
            axis_name,
            "Call this inside `jax.shard_map` over a mesh with this axis, or use `jaxcomm.init`, "
            "`jaxcomm.make_step` or `jaxcomm.simulate`, which bind it.",
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
    checked = {name for name in names(axis_name) if mode(name) == "checked"}

    def localize(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(checked - varying(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(localize, params)


def are_averaged() -> bool:
    """Whether the transformation that ran the backward pass has averaged its gradients."""
    return hasattr(BACKWARD.get(), "finite")


def require_local(updates: PyTree, axis_name: AxisName, outer_axes: tuple[str, ...] = ()) -> None:
    """Raises unless each update varies over exactly the axes of `axis_name`.

    It may also vary over `outer_axes`, which the caller handles. Only checked mode can detect a
    mistake, and a step whose backward pass a transformation runs; in other modes gradients are
    local unless the user has reduced them.
    """
    wanted = set(names(axis_name))
    checked = wanted if are_averaged() else {name for name in wanted if mode(name) == "checked"}
    for path, x in jax.tree_util.tree_leaves_with_path(updates):
        where = jax.tree_util.keystr(path) or "the root"
        if missing := sorted(checked - varying(x)):
            raise ValueError(
                f"The update at {where} does not vary over {missing}: it has been summed already. "
                "Inside `jax.shard_map`, `jax.grad` of replicated parameters is the sum over "
                "workers; use `jaxcomm.local_value_and_grad`, or differentiate with respect to "
                "`jaxcomm.local_params(params)`. If another aggregator precedes this one, remove "
                "one of them. Replace `optax.MultiSteps(tx, k)` with `jaxcomm.accumulate(tx, k)`."
            )
        if others := sorted(varying(x) - wanted - set(outer_axes)):
            raise ValueError(
                f"The update at {where} varies over {others} as well, but "
                f"`axis_name`={axis_name!r} does not include {others}. Sum the update over "
                f"{others} first, or name all axes."
            )


def require_bound(axis_name: AxisName) -> None:
    """Raises if state that differs by worker is initialized outside `jax.shard_map`."""
    if not is_bound(axis_name):
        raise unbound(
            axis_name,
            "Use `jaxcomm.init(tx, params, mesh)` instead of `tx.init(params)`. To a framework "
            "that calls `tx.init`, such as `TrainState.create`, pass `tx._replace(init=lambda "
            "params: jaxcomm.init(tx, params, mesh))`.",
            "This state differs by worker, but ",
        )


def require_own(params: PyTree, axis_name: AxisName) -> None:
    """Raises if parameters are the same on all workers (checked mode only)."""
    checked = {name for name in names(axis_name) if mode(name) == "checked"}
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if missing := sorted(checked - varying(x)):
            raise ValueError(
                f"The parameters at {jax.tree_util.keystr(path) or 'the root'} do not differ by "
                f"worker over {missing}, so there is nothing to mix. Start from "
                "`jaxcomm.replicate(params, mesh)`."
            )


def require_replicated(tree: PyTree, axis_name: AxisName, what: str, remedy: str) -> None:
    """Raises if a leaf differs over axes for which it has no `PerWorker` (checked mode only)."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if differs := sorted(varying(x) & set(names(axis_name)) - {*per_worker_axes(path)}):
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
      ValueError: If the tree differs over other axes, or was made for another number of workers. A
        worker that holds several slices must not use only the first of them.
    """
    axis, workers = label(axis_name), size(axis_name)
    if [*tree.per_worker] != [axis]:
        raise ValueError(
            f"{what} differs by worker over {[*tree.per_worker]}, and `axis_name` is "
            f"{axis_name!r}: the two must be the same axes."
        )

    def take(path: tuple[object, ...], x: jax.Array) -> jax.Array:
        slices = x.shape[0] if x.ndim else 0
        if slices == 1:
            return x[0]
        where = f"{what} at {jax.tree_util.keystr(path) or 'the root'}"
        if mode(names(axis_name)[0]) == "checked" and not varying(x):
            raise ValueError(
                f"{where} is marked as different by worker over {axis!r}, but each worker received "
                f"the whole array, {x.dtype}{list(x.shape)}. Pass `jaxcomm.state_specs(state)` as "
                "`in_specs` and `out_specs` of `jax.shard_map`."
            )
        raise ValueError(
            f"{where} is for {slices * workers} workers, but there are {workers} over {axis!r}. "
            f"Continue with {slices * workers} workers; or make state and parameters for the new "
            "number with `jaxcomm.resize_workers(tx, opt_state, params, workers)`."
        )

    return jax.tree_util.tree_map_with_path(take, tree.per_worker[axis])


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
    wanted = frozenset().union(*(varying(leaf) for leaf in jax.tree.leaves(tree)))
    missing = tuple(sorted(wanted - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


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
            f"The parameters are sharded over {axes}, and this transformation would gather them. "
            "Wrap the aggregator or the gossip method: `jaxcomm.shard_local(tx, specs)` with "
            "`specs = jax.tree.map(lambda x: x.sharding.spec, params)`. `sharded_server` does not "
            "support sharded parameters."
        )


_Arguments = ParamSpec("_Arguments")


_Result = TypeVar("_Result")


class _GivenTo(str):
    """The name of an axis, and the function that it was given to."""

    user: str


def _given_to(user: str, axis_name: Any) -> Any:
    """The axis name, or names, which know the function that they were given to first."""
    if isinstance(axis_name, tuple):
        return tuple(_given_to(user, name) for name in axis_name)
    if not isinstance(axis_name, str) or isinstance(axis_name, _GivenTo):
        return axis_name
    known = _GivenTo(axis_name)
    known.user = user
    return known


def names_itself(fn: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Lets an error that `axis_name` is not bound name the function that has this argument."""
    signature = inspect.signature(fn)
    if "axis_name" not in signature.parameters:
        return fn

    @functools.wraps(fn)
    def named(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return fn(*args, **kwargs)  # It raises an error that names the function.
        bound.apply_defaults()
        axis_name = bound.arguments["axis_name"]
        bound.arguments["axis_name"] = _given_to(fn.__name__, axis_name)
        return fn(*bound.args, **bound.kwargs)

    return named


def _bound_axes() -> list[str]:
    """The bound axes; if JAX does not list them, those of the mesh."""
    manual = lambda: jax.sharding.get_abstract_mesh().manual_axes  # noqa: E731
    return sorted(getattr(jax.extend.core, "unsafe_get_axis_names_DO_NOT_USE", manual)())


def unbound(axis_name: AxisName, nowhere: str, state: str = "") -> ValueError:
    """The error if an axis is not bound: the others, if any are; else `state` and `nowhere`."""
    first, *others = (axis_name,) if isinstance(axis_name, str) else axis_name
    found, user = _bound_axes(), getattr(first, "user", None)
    message = f"`axis_name`={tuple(axis_name) if others else first!r} is not bound here"
    if not found:
        return ValueError(f"{state}{message}. {nowhere}")
    given = f" to `{user}`" if user else ""
    or_others = " (or others of them)" if len(found) > 1 else ""
    return ValueError(
        f"{message}, where the axes are {found}: pass `axis_name={found[0]!r}`{or_others}{given}."
    )


def by_gloo() -> bool:
    """Whether JAX moves arrays between processes on CPUs with Gloo, its default there."""
    implementation = jax.config.jax_cpu_collectives_implementation
    return jax.process_count() > 1 and target().platform == "cpu" and implementation == "gloo"
