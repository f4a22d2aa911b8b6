"""State and parameters for another number of workers, and the rules of transformations."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    SingleDeviceSharding,
)

from jaxcomm import _axis
from jaxcomm._axis import own_params, state_specs
from jaxcomm._contract import AxisName, PerWorker, PyTree
from jaxcomm._mesh import on_a_worker, require_axes
from jaxcomm._workers import consensus, init, mean_of_rows, replicate, worker_axes

Rule = Callable[[PyTree, PyTree], PyTree]
"""`(state, initial state for the new workers) -> state for the new workers`; leaves are global."""


_Node = TypeVar("_Node")


class Noted(NamedTuple):
    """A node of an initial state, and its rule."""

    node: Any
    rule: Rule


_NOTED: contextvars.ContextVar[list[Noted] | None] = contextvars.ContextVar("noted", default=None)


@contextlib.contextmanager
def noting() -> Iterator[list[Noted]]:
    """Collects the rules of all states that are initialized."""
    noted: list[Noted] = []
    token = _NOTED.set(noted)
    try:
        yield noted
    finally:
        _NOTED.reset(token)


def resized_by(node: _Node, rule: Rule) -> _Node:
    """Returns `node`, a part of an initial state, and states the rule by which it is resized.

    A transformation calls it in `init`, if means over workers are wrong for its state. `rule` must
    not change what is equal on all workers, unless it depends on their number.
    """
    noted = _NOTED.get()
    if noted is not None:
        noted.append(Noted(node, rule))
    return node


class Coding(NamedTuple):
    """How a part of a state, such as a residual in 8 bits, encodes an array."""

    decode: Callable[[PyTree], jax.Array]  # part -> [workers, ...]
    encode: Callable[[jax.Array, PyTree, PyTree], PyTree]  # (array, old, new initial part) -> part


class _Static:
    """A value of a node that structures do not compare: all are equal."""

    def __init__(self, coding: Coding) -> None:
        self.coding = coding

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static)

    def __hash__(self) -> int:
        return hash(_Static)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Encoded:
    part: PyTree
    how: _Static = dataclasses.field(metadata={"static": True})


def is_encoded(node: Any) -> bool:
    """Whether a node of a recorded state stands for an array."""
    return isinstance(node, _Encoded)


def encoded_by(part: _Node, coding: Coding) -> _Node:
    """Returns `part`, a part of an initial state, and states how it encodes an array.

    Rules for other numbers of workers then see the array. While rules are collected, the part is
    inside a node, since transformations of JAX keep those, and not the identity of a part.
    """
    return part if _NOTED.get() is None else cast(_Node, _Encoded(part, _Static(coding)))


def with_arrays(rule: Rule, of_old: PyTree, of_new: PyTree) -> Rule:
    """The rule for a part of a state, which sees arrays in place of what encodes them.

    Args:
      rule: The rule for arrays.
      of_old: The part as recorded for the old workers. Shapes of slices depend on their number.
      of_new: The part as recorded for the new ones.
    """
    flat: tuple[list[Any], Any] = jax.tree.flatten(of_new, is_leaf=is_encoded)
    nodes, treedef = flat
    if not any(map(is_encoded, nodes)):
        return rule
    codings = treedef.flatten_up_to(of_old), nodes

    def applied(old: PyTree, new: PyTree) -> PyTree:
        parts = [treedef.flatten_up_to(tree) for tree in (old, new)]
        arrays = [
            treedef.unflatten(
                each.how.coding.decode(part) if is_encoded(each) else part
                for each, part in zip(*both, strict=True)
            )
            for both in zip(codings, parts, strict=True)
        ]
        result = treedef.flatten_up_to(rule(*arrays))
        return treedef.unflatten(
            each.how.coding.encode(x, before, after) if is_encoded(each) else x
            for each, x, before, after in zip(nodes, result, *parts, strict=True)
        )

    return applied


def mean_over_workers(x: Any, workers: int, where: str) -> Any:
    """`[old workers, ...] -> [workers, ...]`: the mean, on each worker, in at least float32.

    Raises:
      ValueError: If the leaf has no mean, and differs by worker.
    """
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.broadcast_to(mean_of_rows(jnp.asarray(x)), (workers, *x.shape[1:]))
    keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    words = np.asarray(jax.random.key_data(x) if keys else x)
    if (words != words[:1]).any():
        raise ValueError(
            f"The state{where} is {x.dtype} and differs by worker, so it has no mean: make a "
            "new one with `jaxcomm.init`."
        )
    return jnp.broadcast_to(x[:1], (workers, *x.shape[1:]))


def total_on_the_first(old: PerWorker, new: PerWorker) -> PerWorker:
    """The rule of counters: the first worker has the total, the others have 0."""
    return jax.tree.map(lambda a, b: b.at[0].set(jnp.sum(a, axis=0)), old, new)


def weighted_mean_of_workers(old: PerWorker, new: PerWorker) -> PerWorker:
    """The rule of `{"mean": ..., "weight": ...}`: the weighted mean, and the mean weight, on each.

    Weights are `[workers, ...]`, and the leaves of the mean have further axes.
    """
    ((axis, running),) = old.per_worker.items()
    weights, workers = running["weight"], len(new.per_worker[axis]["weight"])
    total = jnp.sum(weights, axis=0)
    shares = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1)[None], 0)

    def mean(x: jax.Array) -> jax.Array:
        wide = jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32))
        aligned = shares.reshape(*shares.shape, *[1] * (x.ndim - shares.ndim)).astype(wide.dtype)
        one = jnp.sum(jnp.broadcast_to(aligned, wide.shape) * wide, axis=0).astype(x.dtype)
        return jnp.broadcast_to(one, (workers, *one.shape))

    means = jax.tree.map(mean, running["mean"])
    weight = jnp.broadcast_to(total / len(weights), (workers, *total.shape))
    return PerWorker({axis: {"mean": means, "weight": weight}})


def _leaf_by_default(path: tuple[Any, ...], old: Any, new: Any) -> Any:
    """A leaf that differs by worker takes its mean; others stay."""
    where = jax.tree_util.keystr(path)
    if _axis.per_worker_axes(path):
        old = mean_over_workers(old, new.shape[0], where)
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(
            f"The state{where} is {old.dtype}{list(old.shape)}, but the new workers need "
            f"{new.dtype}{list(new.shape)}: it was made for other parameters or another `tx`."
        )
    return old


def _require_axes_of_workers(state: PyTree, axis_name: AxisName) -> None:
    """Raises if state differs over axes that are not of workers: shards have no common mean."""
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        axes = _axis.per_worker_axes(path)
        if not {*axes} <= {*_axis.names(axis_name)}:
            raise ValueError(
                f"The state{jax.tree_util.keystr(path)} differs over {axes}, but `axis_name` is "
                f"{axis_name!r}: name all axes of the workers. State of shards has no mean."
            )


def _on_one_device(tree: PyTree, what: str) -> PyTree:
    """Without the types of the old mesh, by which an index of a worker would be ambiguous."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(
                f"`{what}{jax.tree_util.keystr(path)}` is on devices of several processes: save "
                "it, and use `jaxcomm.checkpoint.Checkpoints.restore(start, tx=, workers=)`."
            )
    return jax.device_put(tree, SingleDeviceSharding(jax.local_devices()[0]))


def place(x: Any, sharding: Any) -> Any:
    """On these devices, of which other processes may have some."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.device_put(np.asarray(x), sharding)
    data = jax.device_put(np.asarray(jax.random.key_data(x)), sharding)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))


def _applied(of_old: PyTree, raw: PyTree, noted: list[Noted], old: PyTree, new: PyTree) -> PyTree:
    """The old state by the rules of its nodes, which are found in `raw` by identity."""
    rules = {id(each.node): each.rule for each in noted}
    flat: tuple[list[tuple[Any, Any]], Any] = jax.tree_util.tree_flatten_with_path(
        raw, is_leaf=lambda x: id(x) in rules or is_encoded(x)
    )
    leaves, treedef = flat
    if len(rules) > sum(id(node) in rules for _, node in leaves):
        raise ValueError(
            "A wrapper in `tx`, such as `shard_local`, has a state whose rule for other workers "
            "is unknown: make a new one with `jaxcomm.init`."
        )

    def resized(leaf: tuple[Any, Any], node_of_old: Any, before: Any, after: Any) -> Any:
        path, node = leaf
        rule = rules.get(id(node), functools.partial(_leaf_by_default, path))
        return with_arrays(rule, node_of_old, node)(before, after)

    trees = [treedef.flatten_up_to(tree) for tree in (of_old, old, new)]
    whole: PyTree = treedef.unflatten([resized(*each) for each in zip(leaves, *trees, strict=True)])
    return whole


def _recorded(
    tx: optax.GradientTransformation, params: PyTree, sizes: Mapping[str, int]
) -> tuple[PyTree, list[Noted]]:
    """The initial state of a worker among so many, while it is traced, and the rules of nodes."""
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
    first = lambda params: tx.init(own_params(params))  # noqa: E731
    with noting() as noted:
        return on_a_worker(first, mesh, (state_specs(params),), (params,)), noted


def _old_sizes(
    opt_state: PyTree, fresh: PyTree, sizes: Mapping[str, int]
) -> Mapping[str, int] | None:
    """The number of old workers, if the state of a worker has other shapes among so many."""
    leaves = [jax.tree_util.tree_leaves_with_path(tree) for tree in (opt_state, fresh)]
    for (path, old), (_, new) in zip(*leaves, strict=False):
        if _axis.per_worker_axes(path) and old.shape[1:] != new.shape[1:]:
            return {name: len(old) for name in sizes} if len(sizes) == 1 else None
    return None


def resize_workers(
    tx: optax.GradientTransformation,
    opt_state: optax.OptState,
    params: PyTree,
    workers: Mesh | int | Mapping[str, int],
    *,
    axis_name: AxisName = "data",
) -> tuple[optax.OptState, PyTree]:
    r"""The optimizer state and the parameters for another number of workers, or another mesh.

    .. math:: e_j' = \frac{1}{n} \sum_{i=1}^{n} e_i, \qquad j = 1, \ldots, m

    So the mean of residuals, and with it what later updates make up for, does not change. The same
    holds for momenta and other floating-point state that differs by worker. Memory that
    :func:`jaxcomm.compression.compressed_memory` keeps is decoded and encoded again: the rounding
    error of the mean is that of one encoding, divided by the number of workers. State of owners of
    slices, as of :func:`jaxcomm.sharded_server` and :func:`jaxcomm.two_stage_mean`, is concatenated
    and cut again. State that is equal on all workers stays as it is. Memory of gossip starts again.
    Parameters that differ by worker start from their consensus.

    Args:
      tx: The transformation for the new workers: that of the state, or, for gossip, the same method
        with a graph of as many workers.
      opt_state: The state for the old workers.
      params: The parameters: equal on all workers, or a `PerWorker` for the old workers.
      workers: A mesh, a number of workers, or sizes of axes by name, as for :func:`jaxcomm.init`.
      axis_name: The mesh axis, or axes, of the workers, on a mesh too.

    Returns:
      `(opt_state, params)`, placed for the new workers. Nothing is sent except to place them.

    Raises:
      ValueError: If the state belongs to another `tx` or other parameters, or differs over axes
        that are not of workers; or if a leaf has no mean
        and its transformation states no rule; or if it is on devices of several processes. The
        error names the leaf.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> tx = optax.chain(jaxcomm.top_k_sgd(ratio=0.5), optax.sgd(1.0))
      >>> step = jaxcomm.simulate(lambda w, x: jnp.mean(x @ w), tx, 4)
      >>> params = jnp.ones(2)
      >>> batch = jnp.float32([[1, 2], [1, 4], [3, 2], [3, 4]])
      >>> params, state, _ = step(params, jaxcomm.init(tx, params, 4), batch)
      >>> state, params = jaxcomm.resize_workers(tx, state, params, 2)
      >>> print(state[0].own.per_worker["data"][0].kept)
      [[1.25 0.5 ]
       [1.25 0.5 ]]
    """
    _require_axes_of_workers(opt_state, axis_name)
    opt_state, params = _on_one_device(opt_state, "opt_state"), _on_one_device(params, "params")
    if isinstance(workers, Mesh):
        require_axes(workers, axis_name)
        sizes = {name: workers.shape[name] for name in _axis.names(axis_name)}
    else:
        sizes = worker_axes(workers, axis_name)
    if isinstance(params, PerWorker):
        params = replicate(consensus(params), sizes, axis_name=axis_name)
    fresh = init(tx, params, sizes, axis_name=axis_name)
    recorded, noted = _recorded(tx, params, sizes)
    old_sizes = _old_sizes(opt_state, fresh, sizes)
    of_old = recorded if old_sizes is None else _recorded(tx, params, old_sizes)[0]
    result: tuple[optax.OptState, PyTree] = (
        _applied(of_old, recorded, noted, opt_state, fresh),
        params,
    )
    if isinstance(workers, Mesh):
        specs = state_specs(result)
        result = jax.tree.map(lambda x, spec: place(x, NamedSharding(workers, spec)), result, specs)
    return result
