"""The report of what a program sends."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxcomm.wire._collective import (
    Branches,
    Collective,
    Cost,
    Node,
    amortized,
    bytes_of,
    flat,
    heaviest,
    messages_of,
    messages_sent,
)
from jaxcomm.wire._compiled import Work
from jaxcomm.wire._program import table

_ROWS, _WIDTH = 30, 120


class Account:
    """The collectives of a program and their cost.

    One branch of a conditional runs. Totals count the one with the largest cost, so they are the
    most that a run sends; `bytes_of_branches` counts all of them.

    Attributes:
      collectives: Every collective, including those of all branches of a conditional.
      axes: The names of the axes of the program's meshes.
    """

    def __init__(self, nodes: tuple[Node, ...], axes: Iterable[str]):
        self._nodes = nodes
        self.collectives: tuple[Collective, ...] = tuple(flat(nodes))
        self.axes = frozenset(axes).union(*(c.axes for c in self.collectives))

    @property
    def unbounded(self) -> bool:
        """Whether a loop of unknown length sends; totals then count one iteration only."""
        return any(collective.unbounded for collective in self.collectives)

    @property
    def at_most(self) -> bool:
        """Whether bytes are an upper bound: they count whole operands, which XLA may shard.

        A program does not specify how an array is sharded over an automatic axis of the mesh.
        """
        return any(collective.automatic for collective in self.collectives)

    @property
    def bytes_per_worker(self) -> float:
        """Bytes that one device sends; a conditional counts as its heaviest branch."""
        return sum(self.bytes_by_axis.values())

    @property
    def bytes_of_branches(self) -> float:
        """Bytes of all collectives, as if every branch of every conditional ran."""
        return bytes_of([*self.collectives])

    def bytes_sent(self, worker: int) -> float:
        """Bytes that one worker sends, which differ by worker if only some take part in messages.

        A permutation counts for its senders only, where `bytes_per_worker` counts it for all.

        Args:
          worker: The index of the worker on the axes of the collectives.
        """
        return self._of_worker(lambda collective: collective.bytes_sent(worker))

    def bytes_received(self, worker: int) -> float:
        """Bytes that one worker receives; in a ring as many as it sends.

        Args:
          worker: The index of the worker on the axes of the collectives.
        """
        return self._of_worker(lambda collective: collective.bytes_received(worker))

    def _of_worker(self, bytes_of_one: Callable[[Collective], float]) -> float:
        def total(collectives: list[Collective]) -> float:
            return sum(map(bytes_of_one, collectives))

        return total(self.heaviest(total))

    @property
    def messages(self) -> int:
        """Sequential messages of one device; a conditional counts as its branch with the most."""
        return messages_of(heaviest(self._nodes, messages_of))

    def amortized_bytes_per_worker(self, share: float) -> float:
        r"""Returns the average bytes per run that one worker sends, if only some runs send.

        .. math:: b_\text{lightest} + s\, (b_\text{heaviest} - b_\text{lightest})

        over the branches of every conditional: exact for two branches, and for branches that send
        equally much, such as those of random pairs; otherwise an upper bound. For workers that
        synchronize in every H-th step, :math:`s = 1/H`. For MATCHA, :math:`s` is the mean of the
        matchings' probabilities.

        Args:
          share: :math:`s`, the fraction of runs in which a conditional takes its heaviest branch, 0
            to 1.

        Raises:
          ValueError: If `share` is out of range.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"`share` must be from 0 to 1, got {share!r}.")
        return amortized(self._nodes, share)

    @property
    def bytes_by_axis(self) -> dict[str, float]:
        """Bytes that one device sends over each axis; several axes are joined by commas."""
        totals: dict[str, float] = {}
        for collective in heaviest(self._nodes, bytes_of):
            axis = ",".join(collective.axes)
            totals[axis] = totals.get(axis, 0.0) + collective.bytes_per_worker
        return totals

    def heaviest(self, cost: Cost) -> list[Collective]:
        """The collectives that run if every conditional takes the branch with the largest cost.

        Args:
          cost: `collectives -> number`, for the collectives of a branch.
        """
        return heaviest(self._nodes, cost)

    def seconds(self, bytes_per_second: float, latency: float = 0.0) -> float:
        r"""Returns the time on a link without overlap: messages x latency + bytes / bandwidth.

        Collectives that compilers combine count as one message: all-reduces of one kind and dtype
        over the same axes that do not depend on each other. XLA combines all of them on CPU and
        TPU. On GPU it combines them up to a size (30 MB by default) and sends a few more messages
        above it.

        Args:
          bytes_per_second: The bandwidth of one device.
          latency: The seconds per message; a ring all-reduce has 2 (n - 1) sequential messages.

        Raises:
          ValueError: If a loop of unknown length sends.
        """
        if self.unbounded:
            raise ValueError("A loop of unknown length sends each time, so the time is unknown.")

        def cost(collectives: list[Collective]) -> float:
            return messages_of(collectives) * latency + bytes_of(collectives) / bytes_per_second

        return cost(self.heaviest(cost))

    @property
    def widened_bytes(self) -> float:
        """What XLA for CPUs sends beside the total, since it sends some floats as wider ones."""
        sent = heaviest(self._nodes, bytes_of)
        return sum(
            c.bytes_per_worker * (c.widened.itemsize / c.dtype.itemsize - 1)
            for c in sent
            if c.widened is not None
        )

    @property
    def overlapped(self) -> float:
        """The share of bytes during whose messages a compiled program computes products, 0 to 1."""
        sent = heaviest(self._nodes, bytes_of)
        hidden = bytes_of([c for c in sent if c.is_overlapped])
        return hidden / self.bytes_per_worker if self.bytes_per_worker else 1.0

    def table(self) -> list[dict[str, Any]]:
        """A row per collective, for a data frame; the arrays of a combined message have one each.

        Beside the fields of an entry of `collectives`: its `bytes`, and the `flops` that a compiled
        program computes until it awaits the message.
        """
        return [
            {
                "kind": c.kind,
                "axes": ",".join(c.axes),
                "workers": c.workers,
                "dtype": str(c.dtype),
                "shape": c.shape,
                "times": c.times,
                "unbounded": c.unbounded,
                "bytes": c.bytes_per_worker,
                "within": " / ".join(c.path),
                "message": c.group,
                "combined": c.combined,
                "asynchronous": c.asynchronous,
                "flops": c.during.flops,
                "source": c.source,
                "scope": c.scope,
            }
            for c in self.collectives
        ]

    def json(self) -> str:
        """The report as JSON, for `jaxcomm.wire.require(same_as=...)`; one line each."""
        rows = ",\n".join(map(json.dumps, _lists(self._nodes)))
        return f'{{"axes": {json.dumps(sorted(self.axes))}, "collectives": [\n{rows}\n]}}\n'

    def __str__(self) -> str:
        equal: dict[Any, list[Collective]] = {}
        for c in self.collectives:
            key = c.kind, c.axes, c.workers, _label(c), c.path, c.where, c.automatic
            equal.setdefault(key, []).append(c)
        rows = sorted(equal.values(), key=bytes_of, reverse=True)
        shown, others = rows[:_ROWS], rows[_ROWS:]
        cells = [_HEADER, *map(_cells, shown)]
        columns = 8 + 2 * any(c.asynchronous for c in self.collectives)
        columns = max(columns, 8 + any(row[0].where for row in shown))
        lines = table([row[:columns] for row in cells])
        lines = [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..." for line in lines]
        if others:
            rest = sum(map(bytes_of, others))
            lines.append(f"and {len(others)} others: {rest:,.0f} bytes")
        bound = "at least " if self.unbounded else "at most " if self.at_most else ""
        lightest = self.amortized_bytes_per_worker(0)
        lower = "" if lightest == self.bytes_per_worker else f"{lightest:,.0f} to "
        lines.append(f"bytes sent per worker, in rings: {bound}{lower}{self.bytes_per_worker:,.0f}")
        if any(c.combined > 1 for c in self.collectives):
            lines.append("Of several arrays in one message, XLA keeps the source of one.")
        if self.widened_bytes:
            lines.append(
                f"* XLA for CPUs sends wider numbers: {self.widened_bytes:,.0f} bytes more."
            )
        return "\n".join(lines)

    __repr__ = __str__


_HEADER = (
    *("collective", "axis", "workers", "dtype", "shape", "times", "bytes", "within"),
    *("where", "meanwhile"),
)


def _label(c: Collective) -> str:
    return f"{c.dtype}{'*' * bool(c.widened)}"


def _cells(row: Sequence[Collective]) -> tuple[str, ...]:
    """Collectives that differ in their shapes only."""
    c = row[0]
    sizes = {"x".join(map(str, each.shape)) or "scalar" for each in row}
    times = messages_sent([*row])
    flops = sum({each.group: each.during.flops for each in row}.values())
    return (
        c.kind,
        ",".join(c.axes),
        str(c.workers),
        _label(c),
        f"{len(row)} arrays" if len(row) > times or len(sizes) > 1 else sizes.pop(),
        f">={times}" if c.unbounded else str(times),
        f"{'<=' if c.automatic else ''}{bytes_of([*row]):,.0f}",
        " / ".join(c.path) or "-",
        "/".join(c.where.split("/")[-2:]) if ":" in c.where else c.where,
        f"{flops:.2g} FLOP" if any(each.asynchronous for each in row) else "-",
    )


def _lists(nodes: Sequence[Node]) -> list[Any]:
    """Collectives as dicts, and conditionals as lists of branches."""

    def plain(c: Collective) -> dict[str, Any]:
        kept = c._asdict() | {"dtype": str(c.dtype), "widened": c.widened and str(c.widened)}
        defaults = Collective._field_defaults
        return {key: x for key, x in kept.items() if key not in defaults or x != defaults[key]}

    return [
        plain(node) if isinstance(node, Collective) else [*map(_lists, node.branches)]
        for node in nodes
    ]


def read(text: str) -> Account:
    """The report that `Account.json` has written.

    Raises:
      ValueError: If it is not one.
    """

    def tuples(x: Any) -> Any:
        return tuple(map(tuples, x)) if isinstance(x, list) else x

    def node(x: Any) -> Node:
        if isinstance(x, list):
            return Branches(tuple(tuple(map(node, branch)) for branch in x))
        given = {key: tuples(value) for key, value in x.items()}
        given["dtype"] = jnp.dtype(given["dtype"])
        if given.get("widened"):
            given["widened"] = jnp.dtype(given["widened"])
        return Collective(**given | {"during": Work(*given.get("during", (0, 0)))})

    try:
        given = json.loads(text)
        return Account(tuple(map(node, given["collectives"])), given["axes"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError("This is not a report that `account(...).json()` has written.") from error
