"""Which devices of a compiled program exchange messages, and over which axes of a mesh."""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

Groups = tuple[tuple[int, ...], ...]
"""Disjoint groups of devices, by their positions in the order of the mesh."""

_ATTRIBUTE = re.compile(r"\breplica_groups=")
_PAIRS = re.compile(r"source_target_pairs=\"?\{((?:\{\d+,\s*\d+\},?\s*)*)\}")
_LIST = re.compile(r"\{((?:\{[\d,\s]*\},?\s*)*)\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"mesh\[([^\]]*)\](?:, device_ids=\(\[?([\d,\s]+)\]?(?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_AXIS = re.compile(r"'?([^'=,:]+)'?=(\d+)")
_PART = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")
# Whose numbers are of partitions, not of replicas, if messages have a channel.
_BY_PARTITION = ("all-to-all", "collective-permute", "collective-broadcast", "ragged-all-to-all")


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _rows(numbers: np.ndarray) -> Groups:
    return tuple(map(tuple, numbers.tolist()))


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """`[4,2]T(1,0)`: the numbers 0 to 7 as 4 by 2, transposed."""
    numbers = np.arange(math.prod(_numbers(sizes))).reshape(_numbers(sizes))
    return numbers.transpose(_numbers(order)) if order else numbers


def _of_mesh(axes: str, devices: str | None, order: str | None, chosen: str) -> Groups:
    """`mesh['a'=2,'b'=4] {'b'}`: rows along the axes in braces; `'b':(2)2` is a factor of one."""
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    factors: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    wanted = []
    for name, before, size in _PART.findall(chosen):
        each = (int(before), int(size)) if size else (1, sizes[name])
        factors[name].append(each)
        wanted.append((name, *each))
    dims: list[int] = []
    places: dict[tuple[str, int, int], int] = {}
    for name, whole in sizes.items():
        done = 1
        for before, size in sorted(factors[name]):
            dims += [before // done, size]
            places[name, before, size] = len(dims) - 1
            done = before * size
        dims.append(whole // done)
    numbers = np.arange(math.prod(sizes.values()))
    if devices and sorted(_numbers(devices)) == numbers.tolist():
        numbers = np.asarray(_numbers(devices))
    elif devices:  # The sizes of an array of all numbers, and how it is transposed.
        numbers = _iota(devices, order)
    numbers = numbers.reshape(dims)
    inside = [places[each] for each in wanted]
    outside = [dim for dim in range(len(dims)) if dim not in inside]
    rows = numbers.transpose(outside + inside).reshape(-1, math.prod(dims[i] for i in inside))
    return _rows(rows)


def _written(attributes: str) -> Groups:
    """The groups as the program writes them; none if all take part."""
    begins = _ATTRIBUTE.search(attributes)
    if begins is None:
        return ()
    rest = attributes[begins.end() :]
    if found := _IOTA.match(rest):  # `[2,4]<=[4,2]T(1,0)`: in 2 rows of 4.
        return _rows(_iota(found[2], found[3]).reshape(_numbers(found[1])))
    if found := _MESH.match(rest):
        return _of_mesh(*found.groups())
    if found := _LIST.match(rest):
        return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,\s]*)\}", found[1]))
    raise ValueError("unknown form")


def groups_of(opcode: str, line: str, replicas: int, partitions: int) -> Groups:
    """The groups of devices that a collective joins.

    Args:
      opcode: The collective, such as `"all-reduce"`.
      line: Its instruction.
      replicas: How many replicas the program has.
      partitions: How many partitions each of them has; a device is one partition of a replica.

    Raises:
      ValueError: If the groups are written in a form that is not known.
    """
    try:
        written = _written(line)
        members = [device for group in written for device in group]
        if len(set(members)) != len(members):
            raise ValueError("repeated")
    except (ValueError, KeyError, ZeroDivisionError) as error:
        raise ValueError(f"The groups of this collective are not understood: {line}") from error
    everyone = tuple(range(replicas * partitions))
    channel = re.search(r"\bchannel_id=\d+", line)
    if re.search(r"use_global_device_ids=true", line):
        found = written or (everyone,)
    elif not channel:
        of_replicas = written or (tuple(range(replicas)),)
        found = tuple(
            tuple(replica * partitions + partition for replica in group)
            for group in of_replicas
            for partition in range(partitions)
        )
    elif opcode in _BY_PARTITION:
        of_partitions = written or (tuple(range(partitions)),)
        found = tuple(
            tuple(replica * partitions + partition for partition in group)
            for group in of_partitions
            for replica in range(replicas)
        )
    else:
        of_replicas = written or (tuple(range(replicas)),)
        found = tuple(
            tuple(replica * partitions + p for replica in group for p in range(partitions))
            for group in of_replicas
        )
    if not set(everyone).issuperset(device for group in found for device in group):
        raise ValueError(f"The program does not have the devices of this collective: {line}")
    return found


def pairs_of(line: str, replicas: int, partitions: int) -> Groups:
    """Who sends to whom in a permutation.

    Raises:
      ValueError: If the pairs are written in a form that is not known.
    """
    found = _PAIRS.search(line)
    if found is None:
        raise ValueError(f"The pairs of this collective are not understood: {line}")
    numbers = _numbers(found[1])
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    if re.search(r"\bchannel_id=\d+", line):
        steps, others, stride = 1, replicas, partitions
    else:
        steps, others, stride = partitions, partitions, 1
    return tuple(
        (sender * steps + other * stride, receiver * steps + other * stride)
        for sender, receiver in pairs
        for other in range(others)
    )


def axes_of(groups: Sequence[Sequence[int]], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which the members of groups differ.

    Args:
      groups: Groups of devices, or pairs.
      sizes: The mesh; if empty or of another size, a group is named by its devices.
    """
    largest = max(groups, key=len, default=())
    members = [device for group in groups for device in group]
    if not sizes or max(members, default=0) >= math.prod(sizes.values()):
        return (f"{{{','.join(map(str, largest))}}}",)
    shape = tuple(sizes.values())
    varying = np.zeros(len(shape), bool)
    for group in groups:
        coordinates = np.stack(np.unravel_index(np.asarray(group, int), shape))
        varying |= (coordinates != coordinates[:, :1]).any(axis=1)
    return tuple(name for name, varies in zip(sizes, varying, strict=True) if varies)
