"""Collectives and checks over mesh axes, for all three ways to bind an axis.

The three modes are `"checked"` (`jax.shard_map` with `check_vma=True`: a value's type lists the
axes over which it varies), `"unchecked"` (`check_vma=False`) and `"vmap"` (the simulator,
`jax.vmap(axis_name=...)`). Only this module distinguishes them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, cast

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _rounds
from jaxcomm._base import AxisName, PerWorker, PyTree
from jaxcomm._deferred import are_averaged
from jaxcomm._moved import as_moved
from jaxcomm._unbound import unbound

Mode = Literal["checked", "unchecked", "vmap"]


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
    return math.prod(lax.axis_size(name) for name in names(axis_name))


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


def local_params(params: PyTree, axis_name: AxisName = "data") -> PyTree:
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


def marked(tree: PyTree, axis_name: AxisName) -> PerWorker:
    """Marks this worker's values as different by worker, with a leading axis of 1 and in types.

    A state whose first values are typed so can be the carry of a loop inside `jax.shard_map`.
    """
    if jax.tree.leaves(tree):  # An empty memory needs no bound axis.
        tree = local_params(tree, axis_name)
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


def is_simulated(axis_name: AxisName) -> bool:
    """Whether `jax.vmap` binds an axis, so that nothing is sent over it."""
    return any(mode(name) == "vmap" for name in names(axis_name))


def _in_words(
    move: Callable[[jax.Array], jax.Array], x: jax.Array, axis_name: AxisName
) -> jax.Array:
    """Moves 16-bit and 8-bit floats as unsigned words: XLA widens them in collectives on CPU."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    if not narrow or is_simulated(axis_name):
        return move(x)
    words = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    received = lax.bitcast_convert_type(move(words), x.dtype)
    return cast(jax.Array, as_moved(move, x, received))


def gather(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """The values of all workers, `[workers, ...]`, ordered by `index`, equal on all workers."""
    modes = {mode(name) for name in names(axis_name)}

    def move(x: jax.Array) -> jax.Array:
        if modes == {"checked"}:
            return lax.all_gather(x, names(axis_name), to="invarying")
        if modes == {"unchecked"}:
            return lax.all_gather(x, names(axis_name))
        gathered = x
        for name in reversed(names(axis_name)):  # `jax.vmap` gathers over one name at a time.
            options = {"to": "invarying"} if mode(name) == "checked" else {}
            gathered = lax.all_gather(gathered, name, **options)
        return gathered.reshape(size(axis_name), *x.shape)

    return _in_words(move, x, axis_name)


def exchange(rows: jax.Array, axis_name: AxisName) -> jax.Array:
    """Sends row i of `[workers, ...]` to worker i; returns the received rows, in worker order."""
    if size(axis_name) == 1:
        return as_varying(rows, axis_name)

    def move(rows: jax.Array) -> jax.Array:
        if "vmap" not in {mode(name) for name in names(axis_name)}:
            return _rounds.all_to_all(rows, names(axis_name))
        shape = rows.shape
        rows = rows.reshape(*(lax.axis_size(name) for name in names(axis_name)), *shape[1:])
        for position, name in enumerate(names(axis_name)):
            # `jax.vmap` exchanges only what it maps. XLA removes the choice between equals.
            rows = jnp.where(lax.axis_index(name) >= 0, rows, rows)
            rows = lax.all_to_all(rows, name, position, position)
        return rows.reshape(shape)

    return _in_words(move, as_varying(rows, axis_name), axis_name)


def shift(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Sends `x` to the next worker of the ring; returns the value of the previous worker."""
    if size(axis_name) == 1:
        return as_varying(x, axis_name)

    def along(x: jax.Array, over: tuple[str, ...]) -> jax.Array:
        workers = size(over)
        ring = [(worker, (worker + 1) % workers) for worker in range(workers)]
        if len(over) == 1:
            return lax.ppermute(x, over[0], ring)
        if "vmap" not in {mode(name) for name in over}:
            return lax.ppermute(x, over, ring)
        # `jax.vmap` permutes over one name at a time. The predecessor of the first worker along
        # the last axis is at the end of the previous row.
        shifted = along(x, over[-1:])
        return jnp.where(index(over[-1]) == 0, along(shifted, over[:-1]), shifted)

    move = lambda x: along(x, names(axis_name))  # noqa: E731
    return _in_words(move, as_varying(x, axis_name), axis_name)


def swap(x: jax.Array, axis_name: AxisName, distance: int) -> jax.Array:
    """Exchanges `x` with worker `index ^ distance`; returns `x` if there is no such worker."""
    workers = size(axis_name)
    partner = [w ^ distance if w ^ distance < workers else w for w in range(workers)]
    over = names(axis_name)

    def move(x: jax.Array) -> jax.Array:
        # `jax.vmap` permutes over one name at a time, and requires that every worker receives.
        if len(over) > 1 and "vmap" in {mode(name) for name in over}:
            return gather(x, axis_name)[jnp.asarray(partner)[index(axis_name)]]
        return lax.ppermute(x, over if len(over) > 1 else over[0], [*enumerate(partner)])

    return _in_words(move, as_varying(x, axis_name), axis_name)


def permute(x: jax.Array, axis_name: AxisName, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """Sends `x` along pairs (sender, receiver); a worker that receives nothing gets zeros."""
    over, workers = names(axis_name), size(axis_name)
    sender_of = {receiver: sender for sender, receiver in pairs}

    def move(x: jax.Array) -> jax.Array:
        if "vmap" not in {mode(name) for name in over}:
            return lax.ppermute(x, over if len(over) > 1 else over[0], pairs)
        # `jax.vmap` permutes over one name at a time, and requires that every worker receives.
        idle = iter(sorted(set(range(workers)) - set(sender_of.values())))
        senders = [sender_of[w] if w in sender_of else next(idle) for w in range(workers)]
        if len(over) > 1:
            received = gather(x, axis_name)[jnp.asarray(senders)[index(axis_name)]]
        else:
            received = lax.ppermute(x, over[0], [(s, w) for w, s in enumerate(senders)])
        receives = jnp.asarray([w in sender_of for w in range(workers)])[index(axis_name)]
        return jnp.where(receives, received, jnp.zeros((), x.dtype))

    return _in_words(move, as_varying(x, axis_name), axis_name)


def varying_like(x: jax.Array, tree: PyTree) -> jax.Array:
    """`x` typed as varying over all axes over which `tree` varies, for the carry of a loop."""
    wanted = frozenset().union(*(varying(leaf) for leaf in jax.tree.leaves(tree)))
    missing = tuple(sorted(wanted - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


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

    Raises:
      ValueError: If the current mesh has no such axes.
    """
    current = jax.sharding.get_abstract_mesh()
    if missing := [name for name in axes if name not in current.axis_names]:
        raise ValueError(
            f"`specs` name {missing}, which the mesh with axes {current.axis_names} does not have."
        )
    return jax.shard_map(
        fn,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes),
        check_vma=mode(names(axis_name)[0]) == "checked",
    )


def as_varying(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """`x` typed as varying over `axis_name`; the identity except in checked mode."""
    return cast(jax.Array, local_params(x, axis_name))
