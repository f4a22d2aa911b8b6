"""Budgets of what a program may send, for tests."""

import collections
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from jaxcomm.wire._account import Account, read
from jaxcomm.wire._collective import Collective, bytes_of, messages_sent
from jaxcomm.wire._count import account
from jaxcomm.wire._program import table

Size = float | str
"""Bytes, or a text with a unit: `"2.5 MB"` is 2,500,000 and `"1 MiB"` is 1,048,576."""

_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_LISTED = 10


class WireError(AssertionError):
    """A program that does not keep its budget.

    Attributes:
      collectives: Those that break it.
      report: The account of the program.
    """

    def __init__(self, message: str, collectives: Iterable[Collective], report: Account):
        super().__init__(message)
        self.collectives = tuple(
            {id(c): c for c in collectives}.values()
        )  # Equal ones are several.
        self.report = report


def _size(given: Size) -> float:
    if not isinstance(given, str):
        return float(given)
    found = re.fullmatch(r"([\d.,]+) ?([A-Za-z]+)", given.strip())
    if not found or found[2] not in _UNITS:
        raise ValueError(f"A size is a number of bytes, or a text such as '2.5 MB'; got {given!r}.")
    return float(found[1].replace(",", "")) * _UNITS[found[2]]


def _by_axis(report: Account, given: Any, whole: Any) -> dict[str | None, Any]:
    """A limit for each axis; that of no axis is for all collectives."""
    if not isinstance(given, Mapping):
        return {None: whole(given)}
    if unknown := sorted(given.keys() - report.axes) if report.collectives else []:
        raise ValueError(
            f"The program has no axis {unknown[0]!r}: its axes are {sorted(report.axes)}. If they "
            "have lost their names, pass `mesh`."
        )
    return {axis: whole(x) for axis, x in given.items()}


def _names(given: Any) -> set[str]:
    each = [given] if isinstance(given, str) or not isinstance(given, Collection) else given
    return {jnp.dtype(x).name for x in each}


def _lines(found: Iterable[Collective]) -> str:
    """The largest collectives, with the lines that they come from; equal ones share a row."""
    equal: dict[tuple[Any, ...], list[Collective]] = {}
    for c in found:
        key = c.kind, c.axes, c.dtype, c.shape, c.times, c.path, c.where
        equal.setdefault(key, []).append(c)
    largest = sorted(equal.values(), key=bytes_of, reverse=True)
    rows = [
        (
            f"    {c.kind}",
            ",".join(c.axes),
            f"{c.dtype}[{','.join(map(str, c.shape))}]",
            f"x{c.times}",
            f"{f'{len(several)} equal, ' * (len(several) > 1)}{bytes_of(several):,.0f} bytes",
            " / ".join(c.path) or "-",
            c.where or "(of an unknown line)",
        )
        for several in largest[:_LISTED]
        for c in several[:1]
    ]
    others = sum(map(len, largest[_LISTED:]))
    return "\n".join([*table(rows), *([f"    and {others} others"] if others else [])])


class _Budget:
    """Collects what breaks the budget of a program."""

    def __init__(self, report: Account):
        self.report = report
        self.broken: list[str] = []
        self.found: list[Collective] = []

    def breaks(self, what: str, found: Iterable[Collective]) -> None:
        found = [*found]
        self.broken.append("\n".join(filter(None, [f"  {what}", _lines(found)])))
        self.found += found

    def every(self, what: str, allows: Callable[[Collective], bool]) -> None:
        """Breaks it if some collectives are not allowed."""
        if found := [c for c in self.report.collectives if not allows(c)]:
            self.breaks(what, found)

    def total(
        self, name: str, limit: float, counts: Callable[[Collective], bool], of: Callable[..., Any]
    ) -> None:
        """Breaks it if those that count have together more than a limit, in the worst branches."""

        def cost(found: list[Collective]) -> float:
            return float(of([c for c in found if counts(c)]))

        found = [c for c in self.report.heaviest(cost) if counts(c)]
        least = "at least " if any(c.unbounded for c in found) else ""
        if cost(found) > limit or least:
            self.breaks(
                f"{name}: {least}{cost(found):,.0f}, at most {limit:,.0f} are allowed", found
            )


def require(
    program: Any,
    *args: Any,
    bytes: Size | Mapping[str, Size] | None = None,
    collectives: int | Mapping[str, int] | None = None,
    dtypes: Any = None,
    bits: int | None = None,
    above: Size = 0,
    outside_loops: bool = False,
    only_axes: str | Collection[str] | None = None,
    overlapped: float | None = None,
    same_as: Account | str | os.PathLike[str] | None = None,
    mesh: Any = None,
) -> Account:
    """Raises unless a program keeps its budget of communication; for a test in one line.

    Totals are those of the branches that send most. A total that depends on a loop of unknown
    length breaks any limit, since nothing bounds it.

    Args:
      program: What `jaxcomm.wire.account` takes, or its report.
      *args: The arguments of a function.
      bytes: What one device may send; or for each axis, what collectives over it may send.
      collectives: How many messages may be sent, each as often as its loops run; or for each kind,
        such as `{"all_reduce": 2}`, and then no other kinds.
      dtypes: What may be sent, such as `{"int8", "uint32"}`; or for each axis,
        `{"dcn": {"int8"}}`.
      bits: How wide a number that is sent may be.
      above: For `dtypes`, `bits`, `outside_loops` and `only_axes`, collectives that send at most
        this, in all runs of their loops, are not looked at, such as the sum of a loss.
      outside_loops: Whether no loop may send.
      only_axes: The axes over which anything may be sent.
      overlapped: The share of bytes, 0 to 1, that must be on the way while the program computes
        products; of a program that is compiled for TPU or GPU.
      same_as: A report that must be the same but for its lines, or the file with its `json()`.
      mesh: The mesh of a compiled program, if `program` is one and does not say it.

    Returns:
      The report of the program.

    Raises:
      WireError: If the program does not keep the budget, with the collectives that break it and
        the lines that they come from.
      ValueError: If a size is not one, or the program does not have an axis that is limited.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> from jaxcomm import wire
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> def total(x):
      ...     return jax.lax.psum(x, "data")
      >>> run = jax.shard_map(total, mesh=mesh, in_specs=P(), out_specs=P())
      >>> report = wire.require(run, jnp.ones(100), bytes="1 kB", collectives=1)
      >>> try:
      ...     wire.require(run, jnp.ones(100), bits=16)
      ... except wire.WireError as error:
      ...     print(error)  # doctest: +ELLIPSIS
      The program does not keep its budget:
        wider than 16 bits:
          all_reduce  data  float32[100]  x1  700 bytes  -  ...:2
    """
    given = {} if mesh is None else {"mesh": mesh}
    report = program if isinstance(program, Account) else account(program, *args, **given)
    budget, least = _Budget(report), _size(above)

    def large(c: Collective) -> bool:
        return c.bytes_per_worker > least

    def over(axis: str | None) -> Callable[[Collective], bool]:
        return lambda c: axis is None or axis in c.axes

    if bytes is not None:
        for axis, limit in _by_axis(report, bytes, _size).items():
            name = "bytes" if axis is None else f"bytes over {axis!r}"
            budget.total(name, limit, over(axis), bytes_of)
    if isinstance(collectives, Mapping):
        for kind in {**collectives, **{c.kind: 0 for c in report.collectives}}:
            is_kind = lambda c, kind=kind: c.kind == kind  # noqa: E731
            budget.total(kind, collectives.get(kind, 0), is_kind, messages_sent)
    elif collectives is not None:
        budget.total("collectives", collectives, over(None), messages_sent)
    if dtypes is not None:
        for axis, names in _by_axis(report, dtypes, _names).items():
            budget.every(
                f"dtypes other than {', '.join(sorted(names))}{f' over {axis!r}' if axis else ''}:",
                lambda c, axis=axis, names=names: (  # type: ignore[misc]
                    not large(c) or not over(axis)(c) or c.dtype.name in names
                ),
            )
    if bits is not None:
        budget.every(
            f"wider than {bits} bits:", lambda c: not large(c) or 8 * c.dtype.itemsize <= bits
        )
    if outside_loops:
        budget.every("in a loop:", lambda c: not large(c) or not c.in_loop)
    if only_axes is not None:
        axes = {only_axes} if isinstance(only_axes, str) else {*only_axes}
        named = ", ".join(map(repr, sorted(axes)))
        budget.every(f"over other axes than {named}:", lambda c: not large(c) or axes >= {*c.axes})
    if overlapped is not None and report.overlapped < overlapped:
        alone = [c for c in report.collectives if not c.is_overlapped]
        what = f"{report.overlapped:.0%} of the bytes, at least {overlapped:.0%} are asked for:"
        budget.breaks(f"computes products during {what}", alone)
    if same_as is not None:
        _compare(budget, same_as)
    if budget.broken:
        raise WireError(
            "\n".join(["The program does not keep its budget:", *budget.broken]),
            budget.found,
            report,
        )
    return report


def _identity(c: Collective) -> tuple[Any, ...]:
    return (c.kind, c.axes, c.workers, c.dtype.name, c.shape, c.times, c.path, c.pairs)


def _compare(budget: _Budget, same_as: Account | str | os.PathLike[str]) -> None:
    """Breaks the budget for what was added, removed or has changed since an earlier report."""
    earlier = (
        same_as
        if isinstance(same_as, Account)
        else read(pathlib.Path(same_as).read_text(encoding="utf-8"))
    )
    left = collections.Counter(map(_identity, earlier.collectives))
    added = []
    for c in budget.report.collectives:
        if left[_identity(c)]:
            left[_identity(c)] -= 1
        else:
            added.append(c)
    removed = []
    for c in earlier.collectives:
        if left[_identity(c)]:
            left[_identity(c)] -= 1
            removed.append(c)
    changed: list[tuple[Collective, Collective]] = []
    for c in [*added]:
        similar = [old for old in removed if (old.kind, old.axes) == (c.kind, c.axes)]
        near = [old for old in similar if (old.scope, old.path) == (c.scope, c.path)] or similar
        if near:
            changed.append((near[0], c))
            added.remove(c)
            removed.remove(near[0])
    grown = [pair for pair in changed if pair[1].bytes_per_worker > pair[0].bytes_per_worker]
    others = [pair for pair in changed if pair not in grown]
    for what, pairs in (("grew", grown), ("changed, and not grown", others)):
        if pairs:
            before = sum(old.bytes_per_worker for old, _ in pairs)
            after = sum(c.bytes_per_worker for _, c in pairs)
            budget.breaks(f"{what}, {before:,.0f} bytes to {after:,.0f}:", [c for _, c in pairs])
    for what, found in (("added", added), ("removed", removed)):
        if found:
            budget.breaks(f"{what}:", found)
