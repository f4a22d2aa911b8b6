"""The groups of devices of compiled collectives, against a slow oracle and real programs."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxcomm import wire
from jaxcomm.wire._groups import Groups, axes_of, groups_of, pairs_of
from tests.training.places import mesh_of

Rows = list[list[int]]


def as_rows(groups: Groups) -> Rows:
    return sorted(sorted(group) for group in groups)


def as_list(rows: Rows) -> str:
    return "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows) + "}"


def drawn_list(draw: random.Random) -> tuple[str, Rows, int]:
    """Groups as lists, of any sizes, in any order."""
    count = draw.choice([2, 4, 8, 12])
    devices = draw.sample(range(count), count)
    cuts = sorted(draw.sample(range(1, count), draw.randrange(count)))
    rows = [devices[i:j] for i, j in itertools.pairwise([0, *cuts, count])]
    return as_list(rows), rows, count


def counted(sizes: list[int], order: list[int]) -> list[int]:
    """The numbers of an array of these sizes, read in the order of transposed dimensions."""
    found = []
    for place in itertools.product(*(range(sizes[dim]) for dim in order)):
        of_dim = dict(zip(order, place, strict=True))
        number = 0
        for dim, size in enumerate(sizes):
            number = number * size + of_dim[dim]
        found.append(number)
    return found


def drawn_iota(draw: random.Random) -> tuple[str, Rows, int]:
    sizes = [draw.choice([1, 2, 3, 4]) for _ in range(draw.randint(1, 4))]
    count = math.prod(sizes)
    order = draw.sample(range(len(sizes)), len(sizes))
    each = draw.choice([n for n in range(1, count + 1) if count % n == 0])
    numbers = counted(sizes, order)
    rows = [numbers[i : i + each] for i in range(0, count, each)]
    transposed = f"T({','.join(map(str, order))})" if order != sorted(order) else ""
    text = f"[{count // each},{each}]<=[{','.join(map(str, sizes))}]{transposed}"
    return text, rows, count


def drawn_mesh(draw: random.Random) -> tuple[str, Rows, int]:
    """Axes of a mesh, whole or a factor of one, with devices in any order."""
    sizes = {f"axis_{i}": draw.choice([2, 3, 4, 8]) for i in range(draw.randint(1, 3))}
    chosen: list[tuple[str, int, int]] = []
    for name in draw.sample([*sizes], draw.randint(1, len(sizes))):
        size = sizes[name]
        parts = [(i, j) for i in (1, 2, 4) for j in (2, 4) if size % (i * j) == 0 and j < size]
        before, part = draw.choice([(1, size), *parts])
        chosen.append((name, before, part))
    count = math.prod(sizes.values())
    devices = list(range(count))
    quote = draw.choice(["'", ""])
    axes = ",".join(f"{quote}{name}{quote}={size}" for name, size in sizes.items())
    named = ",".join(
        f"{quote}{name}{quote}" + ("" if part == sizes[name] else f":({before}){part}")
        for name, before, part in chosen
    )
    ids = ""
    if draw.random() < 0.5:
        draw.shuffle(devices)
        ids = f", device_ids=({','.join(map(str, devices))})"
    elif len(sizes) > 1 and draw.random() < 0.5:
        order = [*range(1, len(sizes)), 0]
        whole = [*sizes.values()]
        devices = counted(whole, order)
        ids = f", device_ids=([{','.join(map(str, whole))}]T({','.join(map(str, order))}))"
    groups: dict[Any, list[int]] = {}
    for place, device in zip(itertools.product(*map(range, sizes.values())), devices, strict=True):
        coordinates = dict(zip(sizes, place, strict=True))
        for name, before, part in chosen:  # Without the digit that varies within a group.
            after = sizes[name] // before // part
            value = coordinates[name]
            coordinates[name] = (value // (part * after), value % after)  # type: ignore[assignment]
        groups.setdefault(tuple(coordinates.items()), []).append(device)
    return f"mesh[{axes}]{ids} {{{named}}}", [*groups.values()], count


FORMS = {"lists": drawn_list, "iota": drawn_iota, "mesh": drawn_mesh}


@pytest.mark.parametrize("form", FORMS)
def test_groups_of_devices_in_all_forms(form: str) -> None:
    draw = random.Random(form)
    for _ in range(500):
        text, rows, count = FORMS[form](draw)
        line = f"%a = f32[] all-reduce(%b), channel_id=1, replica_groups={text}, "
        line += "use_global_device_ids=true, to_apply=%add"
        assert as_rows(groups_of("all-reduce", line, 1, count)) == sorted(map(sorted, rows)), line


def oracle(opcode: str, rows: Rows, channel: bool, replicas: int, partitions: int) -> Rows:
    """What XLA's modes mean, device by device: those with which each exchanges messages."""
    devices = [(r, p) for r in range(replicas) for p in range(partitions)]
    by_partition = opcode in ("all-to-all", "collective-broadcast")

    def partners(r: int, p: int) -> list[tuple[int, int]]:
        if not channel:
            (row,) = [row for row in rows if r in row]
            return [(other, p) for other in row]
        if by_partition:
            (row,) = [row for row in rows if p in row]
            return [(r, other) for other in row]
        (row,) = [row for row in rows if r in row]
        return [each for each in devices if each[0] in row]

    found = {tuple(sorted(r * partitions + p for r, p in partners(*each))) for each in devices}
    return sorted(map(list, found))


@pytest.mark.parametrize("opcode", ["all-reduce", "all-gather", "all-to-all"])
@pytest.mark.parametrize("channel", [False, True])
def test_replicas_and_partitions(opcode: str, channel: bool) -> None:
    draw = random.Random(opcode)
    for replicas, partitions in [(1, 8), (8, 1), (2, 4), (4, 2)]:
        count = partitions if channel and opcode == "all-to-all" else replicas
        devices = draw.sample(range(count), count)
        for rows in ([devices], [[device] for device in devices], [[*range(count)]]):
            groups = "{}" if rows == [[*range(count)]] else as_list(rows)
            line = f"%a = f32[] {opcode}(%b){', channel_id=3' * channel}, replica_groups={groups}"
            found = as_rows(groups_of(opcode, line, replicas, partitions))
            assert found == oracle(opcode, rows, channel, replicas, partitions), line


def test_pairs_of_replicas_and_of_partitions() -> None:
    line = "%a = f32[] collective-permute(%b){}, source_target_pairs={{{{0,1}},{{1,0}}}}"
    assert pairs_of(line.format(""), 2, 1) == ((0, 1), (1, 0))
    assert pairs_of(line.format(", channel_id=1"), 1, 2) == ((0, 1), (1, 0))
    assert {*pairs_of(line.format(", channel_id=1"), 2, 2)} == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert {*pairs_of(line.format(""), 2, 2)} == {(0, 2), (2, 0), (1, 3), (3, 1)}
    send = '%s = (f32[]) send(%b), frontend_attributes={_xla_pairs="{{0,1}}"}'
    with pytest.raises(ValueError, match="pairs of this collective are not understood: %s"):
        pairs_of(send, 1, 2)


@pytest.mark.parametrize(
    "groups",
    [
        "{{0,1},{1,2}}",
        "[2,4]<=[7]",
        "[2,4]<=[2,4]T(0,0)",
        "mesh['a'=2] {'b'}",
        "mesh['a'=4] {'a':(3)2}",
        "@mesh<a=2>",
        "<{0,1}>",
        "{{0,1},{8,9}}",
    ],
)
def test_an_unknown_form_is_an_error_that_quotes_the_line(groups: str) -> None:
    line = f"%a = f32[4] all-reduce(%b), channel_id=1, replica_groups={groups}, "
    with pytest.raises(ValueError, match=r"of this collective.*all-reduce"):
        groups_of("all-reduce", f"{line}use_global_device_ids=true", 1, 8)


AXES = {"a": 2, "b": 2, "c": 2}
SUBSETS = [s for n in (1, 2, 3) for s in itertools.combinations(AXES, n)]
SENT: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda x, axes: lax.psum(x, axes),
    "all_gather": lambda x, axes: lax.all_gather(x, axes),
    "reduce_scatter": lambda x, axes: lax.psum_scatter(x, axes, tiled=True),
    "all_to_all": lambda x, axes: lax.all_to_all(x, axes, 0, 0, tiled=True),
}


def programs() -> Iterator[tuple[str, tuple[str, ...]]]:
    for number, axes in enumerate(SUBSETS):
        for kind in SENT:
            if kind != "all_to_all" or len(axes) == 1:
                yield kind, axes
        if number < 3:
            yield "ppermute", axes


def test_axes_of_real_programs() -> None:
    """Every subset of three axes, each collective; all of them in one program."""
    mesh = mesh_of(AxisType.Auto, *AXES.values(), names=tuple(AXES))
    expected = []
    for kind, axes in programs():
        size = math.prod(AXES[axis] for axis in axes)
        expected.append((kind, axes, size))

    def run(x: jax.Array) -> Any:
        total = x
        for kind, axes in programs():  # One after the other, so that nothing is combined.
            if kind == "ppermute":
                sent = lax.ppermute(total, axes[0], [(0, 1), (1, 0)])
            else:
                sent = SENT[kind](total, axes)
            total = jnp.sin(total + jnp.sum(sent) / 64)
        return total

    fn = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    x = jnp.ones(16)
    traced, compiled = wire.account(fn, x), wire.account(jax.jit(fn).lower(x))
    for account in (traced, compiled):
        assert [(c.kind, c.axes, c.workers) for c in account.collectives] == [
            (kind, axes, AXES[axes[0]] if kind == "ppermute" else size)
            for kind, axes, size in expected
        ]
    assert traced.bytes_by_axis == compiled.bytes_by_axis


def test_axes_of_part_of_an_axis_and_without_a_mesh() -> None:
    assert axes_of(((0, 1), (2, 3), (4, 5), (6, 7)), {"data": 8}) == ("data",)
    assert axes_of(((0, 5), (1, 4)), {"data": 2, "model": 4}) == ("data", "model")
    assert axes_of(((0, 1), (2, 3)), {}) == ("{0,1}",)
    assert axes_of(((0, 9),), {"data": 8}) == ("{0,9}",)
