"""Assigns leaves to units, which are encoded together, and to groups, which share statistics.

A group shares statistics: a leaf, a bucket of leaves, or all leaves. A unit is encoded as one
array: a large leaf in its own shape, small leaves concatenated, or small leaves of one shape
stacked. The exchange gets all units at once, and decides which of them travel in one message.
"""

import math
from typing import Literal, NamedTuple, get_args

from jaxcomm._base import Layout

Scope = Literal["leaf", "bucket", "tree"]

LARGE = 2**16  # Coordinates; a copy of a larger array costs more than it saves.


class Unit(NamedTuple):
    """The leaves of one unit, by number, with its position and its group."""

    leaves: tuple[int, ...]
    form: Literal["alone", "concatenated", "stacked"]
    coins: tuple[int, ...]  # the bucket whose coins it uses; for a stack, one number per leaf
    start: int  # its first coordinate in that bucket
    group: int  # the group that shares statistics
    statistics_size: int | None = None  # coordinates of the group, if it has several units


def check_scope(scope: str) -> None:
    """Raises unless `scope` is a `Scope`."""
    if scope not in get_args(Scope):
        raise ValueError(f"`scope` must be one of {get_args(Scope)}, got {scope!r}.")


def check_layout(layout: str) -> None:
    """Raises unless `layout` is a `Layout`."""
    if layout not in get_args(Layout):
        raise ValueError(f"A codec's `layout` must be one of {get_args(Layout)}, got {layout!r}.")


def _buckets(sizes: list[int], capacity: int) -> list[list[int]]:
    """Packs consecutive leaves into buckets; a leaf larger than the capacity has its own bucket."""
    buckets: list[list[int]] = []
    room = 0
    for leaf, size in enumerate(sizes):
        if not buckets or size > room:
            buckets.append([])
            room = capacity
        buckets[-1].append(leaf)
        room -= size
    return buckets


def _parts(bucket: list[int], sizes: list[int], layout: Layout) -> list[list[int]]:
    """The leaves of each unit of a bucket: all small leaves in one unit, each large leaf alone."""
    if layout == "concatenated":
        return [bucket]
    small = [leaf for leaf in bucket if sizes[leaf] < LARGE]
    return [*([small] if small else []), *([leaf] for leaf in bucket if sizes[leaf] >= LARGE)]


def _of_leaves(shapes: list[tuple[int, ...]], *, stacks: bool) -> list[Unit]:
    """Units that share nothing; with `stacks`, small leaves of one shape form one unit."""
    members: dict[object, list[int]] = {}
    for leaf, shape in enumerate(shapes):
        stackable = stacks and 0 < math.prod(shape) < LARGE
        members.setdefault(shape if stackable else leaf, []).append(leaf)
    return [
        Unit(tuple(leaves), "stacked" if len(leaves) > 1 else "alone", tuple(leaves), 0, number)
        for number, leaves in enumerate(members.values())
    ]


def divide(
    shapes: list[tuple[int, ...]],
    scope: Scope,
    bucket_bytes: int,
    layout: Layout,
    *,
    stacks: bool,
) -> list[Unit]:
    """The units for leaves of these shapes.

    Args:
      shapes: The shapes of all leaves.
      scope: Which coordinates share statistics.
      bucket_bytes: The maximum size of a bucket in float32 bytes; leaves are never split.
      layout: The `layout` of :class:`jaxcomm.Codec`: how a bucket or a tree is divided.
      stacks: Whether small leaves of one shape, each with separate statistics, become rows of one
        unit, `[leaves, *shape]`.
    """
    if scope == "leaf":
        return _of_leaves(shapes, stacks=stacks)
    sizes = [*map(math.prod, shapes)]
    units: list[Unit] = []
    for number, bucket in enumerate(_buckets(sizes, bucket_bytes // 4)):
        start = 0
        for part in _parts(bucket, sizes, layout):
            alone = layout != "concatenated" and len(part) == 1
            group = len(units) if layout == "independent" else 0 if scope == "tree" else number
            form: Literal["alone", "concatenated"] = "alone" if alone else "concatenated"
            units.append(Unit(tuple(part), form, (number,), start, group))
            start += sum(sizes[leaf] for leaf in part)
    groups: dict[int, list[Unit]] = {}
    for unit in units:
        groups.setdefault(unit.group, []).append(unit)
    statistics_size = {
        group: sum(sizes[leaf] for unit in members for leaf in unit.leaves)
        for group, members in groups.items()
        if len(members) > 1
    }
    return [unit._replace(statistics_size=statistics_size.get(unit.group)) for unit in units]
