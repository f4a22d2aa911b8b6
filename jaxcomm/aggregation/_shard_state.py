"""The state of an aggregator whose parameters are sharded: marks of what differs by shard."""

from typing import Any

import jax
import optax

from jaxcomm import _axis
from jaxcomm._contract import MixingUpdate, PerWorker, PyTree


def _is_marked(node: object) -> bool:
    return isinstance(node, PerWorker)


def marked(state: PyTree, axes: tuple[str, ...], varying: frozenset[str]) -> PyTree:
    """The state of one shard, marked as different over `axes` as well.

    Args:
      state: State whose `PerWorker` leaves differ by worker.
      axes: The axes that shard the parameters.
      varying: The paths of other leaves that differ by shard.

    Raises:
      ValueError: If another leaf differs by shard.
    """

    if not axes:
        return state

    def mark(path: tuple[Any, ...], node: Any) -> Any:
        if isinstance(node, PerWorker):
            if not jax.tree.leaves(node):
                return node
            ((workers, tree),) = node.per_worker.items()
            both = _axis.label((*workers.split(","), *axes))
            return PerWorker({both: _axis.local_params(tree, axes)})
        where = jax.tree_util.keystr(path)
        if where in varying:
            return _axis.marked(node, axes)
        if over := sorted(_axis.varying(node) & set(axes)):
            raise ValueError(
                f"The state at {where or 'the root'} differs over {over}, the axes that shard the "
                "parameters, but it was made without them. Make it with `jaxcomm.init(tx, params, "
                "mesh, shard_axes=...)`."
            )
        return node

    return jax.tree_util.tree_map_with_path(mark, state, is_leaf=_is_marked)


def unmarked(state: PyTree, axes: tuple[str, ...]) -> tuple[PyTree, frozenset[str]]:
    """The inverse of `marked`, and the paths of leaves that differ by shard only."""
    varying: set[str] = set()
    if not axes:
        return state, frozenset()

    def unmark(path: tuple[Any, ...], node: Any) -> Any:
        if not isinstance(node, PerWorker) or not jax.tree.leaves(node):
            return node
        ((label, tree),) = node.per_worker.items()
        names = tuple(label.split(","))
        if names == axes:
            varying.add(jax.tree_util.keystr(path))
            return _axis.own(node, axes)
        if names[-len(axes) :] != axes:
            raise ValueError(
                f"The state at {jax.tree_util.keystr(path)} differs over {list(names)}, not over "
                f"{list(axes)}, the axes that shard the parameters. Make it with `jaxcomm.init(tx, "
                "params, mesh, shard_axes=...)`."
            )
        return PerWorker({_axis.label(names[: -len(axes)]): tree})

    return jax.tree_util.tree_map_with_path(unmark, state, is_leaf=_is_marked), frozenset(varying)


def as_structured(state: PyTree, like: PyTree, label: str) -> PyTree:
    """The state for the shards. It may have been made for whole leaves, without memory."""
    leaves, (expected, structure) = jax.tree.leaves(state), jax.tree.flatten(like)
    if len(leaves) != len(expected):
        raise ValueError(
            f"The state of `shard_local` for leaves over {label!r} was made for other parameters "
            "or without their shards. Make it with `jaxcomm.init(tx, params, mesh, "
            "shard_axes=...)`."
        )
    return jax.tree.unflatten(structure, leaves)


def marked_as_updated(
    tx: optax.GradientTransformationExtraArgs,
    params: PyTree,
    state: PyTree,
    workers: tuple[str, ...],
    axes: tuple[str, ...],
) -> PyTree:
    """The initial state, in which leaves are marked that an update makes different by shard.

    Raises:
      ValueError: If there are no types to find them, and the state has memory.
    """
    if not axes:
        return state
    if _axis.mode(axes[0]) != "checked":
        if any(leaf.ndim for leaf in jax.tree.leaves(state)):
            raise ValueError(
                "The memory of `shard_local` needs `jax.shard_map(..., check_vma=True)`, or "
                "`jaxcomm.init`."
            )
        return state

    def differing(state: PyTree) -> frozenset[str]:
        leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_marked)
        return frozenset(
            jax.tree_util.keystr(path)
            for path, leaf in leaves
            if not _is_marked(leaf) and _axis.varying(leaf) & set(axes)
        )

    def after_update(varying: frozenset[str]) -> frozenset[str]:
        found: list[frozenset[str]] = []

        def update(updates: PyTree, state: PyTree) -> None:
            before, _ = unmarked(marked(state, axes, varying), axes)
            given = [updates] if isinstance(tx.update, MixingUpdate) else []
            found.append(differing(tx.update(updates, before, *given, shard_axes=axes)[1]))

        jax.eval_shape(update, _axis.local_params(params, workers), state)
        return found[0]

    varying = differing(state)
    while not (after := after_update(varying)) <= varying:
        varying |= after
    return marked(state, axes, varying)
