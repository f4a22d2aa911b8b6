"""Divides parameters into groups of leaves and stacks of layers."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomm import _axis
from jaxcomm._contract import PyTree


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
    if sorted(path for group in plan for path in group) != sorted(paths):
        raise ValueError(
            f"`plan` must list each leaf outside stacked layers once: {sorted(paths)}."
        )
    return [[*group] for group in plan if len(group)]


def divide(
    tree: PyTree, plan: Sequence[Sequence[str]] | None, stacked: PyTree, bucket_bytes: int
) -> Divided:
    """Divides a tree of parameters, or of gradients; `Layers` are stacks.

    Raises:
      ValueError: If the plan does not list each leaf outside stacks once, or `stacked` is no
        prefix of the tree.
    """
    marked = jax.tree_util.tree_map_with_path(_marked, stacked, tree)
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
    return _Stack(subtree, jax.tree_util.keystr(path) or "the parameters") if flag else subtree


def workers_first(state: PyTree) -> PyTree:
    """State of stacked layers, its `PerWorker` leaves `[1, layers, ...]`, not `[layers, 1, ...]`.

    It is its own inverse.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.moveaxis(x, 1, 0) if _axis.per_worker_axes(path) else x, state
    )
