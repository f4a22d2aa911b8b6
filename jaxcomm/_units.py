"""Which leaves are encoded at once, and what they share.

Three things come apart here. What shares statistics is a group: a leaf, a bucket of leaves, or all.
What is encoded at once is a unit: a large leaf as it lies in memory, small leaves laid end to end,
or small leaves of one shape in a stack. What travels together is up to the exchange, which gets all
units at once.
"""

import math
from typing import Literal, NamedTuple, get_args

from jaxcomm._base import Layout

Scope = Literal["leaf", "bucket", "tree"]

LARGE = 2**16  # Coordinates; what is larger is worth no copy.


class Unit(NamedTuple):
    """Some leaves, by number, and where they stand among the others."""

    leaves: tuple[int, ...]
    form: Literal["alone", "concatenated", "stacked"]
    coins: tuple[int, ...]  # of which bucket it takes the coins, or of a stack, each leaf its own
    start: int  # at which coordinate of that bucket it begins
    group: int  # with which it shares statistics
    statistics_size: int | None = None  # coordinates of that group, if it has other units


def check_scope(scope: str) -> None:
    """Raises unless `scope` is one of the three."""
    if scope not in get_args(Scope):
        raise ValueError(f"`scope` must be one of {get_args(Scope)}, got {scope!r}.")


def check_layout(layout: str) -> None:
    """Raises unless `layout` is one of the three."""
    if layout not in get_args(Layout):
        raise ValueError(f"A codec's `layout` must be one of {get_args(Layout)}, got {layout!r}.")


def _buckets(sizes: list[int], capacity: int) -> list[list[int]]:
    """Consecutive leaves in as few buckets as fit; a leaf beyond the capacity stands alone."""
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
    """The leaves of each unit of a bucket: small ones together, each large one alone."""
    if layout == "concatenated":
        return [bucket]
    small = [leaf for leaf in bucket if sizes[leaf] < LARGE]
    return [*([small] if small else []), *([leaf] for leaf in bucket if sizes[leaf] >= LARGE)]


def _of_leaves(shapes: list[tuple[int, ...]], *, stacks: bool) -> list[Unit]:
    """Units that share nothing; with `stacks`, small leaves of one shape in one."""
    alike: dict[object, list[int]] = {}
    for leaf, shape in enumerate(shapes):
        stackable = stacks and 0 < math.prod(shape) < LARGE
        alike.setdefault(shape if stackable else leaf, []).append(leaf)
    return [
        Unit(tuple(leaves), "stacked" if len(leaves) > 1 else "alone", tuple(leaves), 0, number)
        for number, leaves in enumerate(alike.values())
    ]


def divide(
    shapes: list[tuple[int, ...]],
    scope: Scope,
    bucket_bytes: int,
    layout: Layout,
    *,
    stacks: bool,
) -> list[Unit]:
    """The units of leaves of these shapes.

    Args:
      shapes: Of all leaves.
      scope: What shares statistics.
      bucket_bytes: The most float32 bytes that a bucket has; leaves are never cut.
      layout: As :class:`jaxcomm.Codec` has it: what a bucket or a tree is made of.
      stacks: Whether small leaves of one shape, each with statistics of its own, become rows of
        one unit, `[leaves, *shape]`.
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
