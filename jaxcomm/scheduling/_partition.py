"""Divides parameters into groups of leaves and stacks of layers."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _axis
from jaxcomm._contract import PyTree
from jaxcomm.scheduling._layers import Layers


@dataclasses.dataclass(frozen=True)
class Divided:
    """A tree as groups of leaves and, after them, stacks of layers."""

    structure: Any
    groups: int
    parts: list[PyTree]  # groups by path, then stacks
    paths: list[str]  # of the stacks
    places: list[tuple[int, str | None]]  # of each node: a group and a path, or a stack

    def joined(self, parts: Sequence[PyTree]) -> PyTree:
        """The tree, with other values in its parts."""
        nodes = [
            parts[number] if path is None else parts[number][path] for number, path in self.places
        ]
        return jax.tree.unflatten(self.structure, nodes)


def _by_size(sizes: dict[str, int], bucket_bytes: int) -> list[list[str]]:
    """Consecutive leaves of up to `bucket_bytes`, the last ones first."""
    groups: list[list[str]] = []
    filled = 0
    for path in reversed(sizes):
        size = 4 * sizes[path]
        if not groups or filled + size > bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(path)
        filled += size
    return groups


def _checked(plan: Sequence[Sequence[str]], paths: set[str]) -> list[list[str]]:
    listed = [path for group in plan for path in group]
    for path in listed:
        if path not in paths:
            raise ValueError(
                f"`plan` lists {path!r}, which is not the path of a leaf outside stacked layers; "
                f"there are {sorted(paths)}."
            )
    twice = sorted({path for path in listed if listed.count(path) > 1})
    missing = sorted(paths - set(listed))
    if twice or missing:
        raise ValueError(
            "`plan` must list each leaf once, but "
            + (f"lists {twice[0]!r} twice." if twice else f"does not list {missing[0]!r}.")
        )
    return [[*group] for group in plan if len(group)]


def divide(
    tree: PyTree, plan: Sequence[Sequence[str]] | None, stacked: PyTree, bucket_bytes: int
) -> Divided:
    """Divides a tree of parameters, or of gradients; `Layers` are stacks.

    Raises:
      ValueError: If the plan does not list each leaf outside stacks once, or layers of a stack
        differ in number.
    """
    try:
        marked = jax.tree_util.tree_map_with_path(_marked, stacked, tree)
    except ValueError as error:
        raise ValueError(
            "`stacked` must be a bool, or a tree of bools that is a prefix of the parameters: "
            f"{error}"
        ) from None
    nodes, structure = jax.tree_util.tree_flatten_with_path(marked, is_leaf=_is_stack)
    named = [(jax.tree_util.keystr(path), node) for path, node in nodes]
    leaves = {path: node for path, node in named if not _is_stack(node)}
    stacks = [node for _, node in named if _is_stack(node)]
    sizes = {path: math.prod(jnp.shape(leaf)) for path, leaf in leaves.items()}
    groups = _by_size(sizes, bucket_bytes) if plan is None else _checked(plan, set(leaves))
    group_of = {path: number for number, group in enumerate(groups) for path in group}
    order = iter(range(len(groups), len(groups) + len(stacks)))
    return Divided(
        structure,
        len(groups),
        [*({path: leaves[path] for path in group} for group in groups), *(s.tree for s in stacks)],
        [stack.path for stack in stacks],
        [(group_of[path], path) if path in leaves else (next(order), None) for path, _ in named],
    )


@dataclasses.dataclass(frozen=True)
class _Stack:
    """A subtree whose leaves are stacked layers."""

    tree: PyTree
    path: str


def _is_stack(node: object) -> bool:
    return isinstance(node, _Stack)


def _marked(path: tuple[Any, ...], flag: object, subtree: PyTree) -> PyTree:
    where = jax.tree_util.keystr(path) or "the parameters"
    if not isinstance(flag, bool):
        raise ValueError(f"at {where} it is {flag!r}")
    if not flag:
        return subtree
    if not isinstance(subtree, Layers):
        counts = {jnp.shape(x)[:1] for x in jax.tree.leaves(subtree)}
        if len(counts) != 1 or counts == {()}:
            raise ValueError(
                f"the layers at {where} must be stacked, `[layers, ...]`, with one number of layers"
            )
    return _Stack(subtree, where)


def workers_first(state: PyTree) -> PyTree:
    """State of stacked layers, its `PerWorker` leaves `[1, layers, ...]`, not `[layers, 1, ...]`.

    It is its own inverse.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.moveaxis(x, 1, 0) if _axis.per_worker_axes(path) else x, state
    )
