"""The cost of a collective, also in conditionals."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from jaxcomm.wire._compiled import Work

# For ring schedules: bytes sent per worker over bytes of the operand, and sequential messages.
_SCHEDULES: dict[str, Callable[[int], tuple[float, int]]] = {
    "all_reduce": lambda n: (2 * (n - 1) / n, 2 * (n - 1)),
    "reduce_scatter": lambda n: ((n - 1) / n, n - 1),
    "all_to_all": lambda n: ((n - 1) / n, n - 1),
    "all_gather": lambda n: (float(n - 1), n - 1),
    "ppermute": lambda n: (1.0, 1) if n > 1 else (0.0, 0),
    "broadcast": lambda n: (1.0, n - 1) if n > 1 else (0.0, 0),
}


class Collective(NamedTuple):
    """One operand of one collective, with the number of times that it runs."""

    kind: str  # "all_reduce", "all_gather", "all_to_all", "reduce_scatter", "ppermute", "broadcast"
    axes: tuple[str, ...]
    workers: int
    dtype: np.dtype
    shape: tuple[int, ...]  # of a device's own shard, if the operand's type has the sharding
    times: int  # how often it runs; an unbounded loop counts once
    path: tuple[str, ...]  # the control flow around it: "scan x5", "cond 1/2", "while"
    group: int  # compilers combine the collectives with one group number in one message
    automatic: tuple[str, ...] = ()  # axes over which XLA may have sharded the operand
    pairs: tuple[tuple[int, ...], ...] = ()  # of a permutation: who sends to whom
    source: str = ""  # the user's line, "train.py:12"; empty within this library
    scope: str = ""  # the named scopes, "global_qsgd/max_abs"
    combined: int = 1  # how many arrays a compiled program sends in its message
    asynchronous: bool = False  # whether a compiled program computes until a later instruction
    during: Work = Work(0, 0)  # what it computes until then
    widened: np.dtype | None = None  # as which dtype XLA for CPUs sends it, if not as its own

    @property
    def bytes_per_worker(self) -> float:
        """Bytes that one device sends in all `times`; an upper bound if axes are automatic."""
        factor, _ = _SCHEDULES[self.kind](self.workers)
        return self.times * factor * math.prod(self.shape) * self.dtype.itemsize

    def bytes_sent(self, worker: int) -> float:
        """Bytes that this worker sends; those of a device unless some workers do not send."""
        sends = not self.pairs or any(i == worker != j for i, j in self.pairs)
        return self.bytes_per_worker if sends else 0.0

    def bytes_received(self, worker: int) -> float:
        """Bytes that this worker receives; in a ring as many as it sends."""
        receives = not self.pairs or any(i != worker == j for i, j in self.pairs)
        return self.bytes_per_worker if receives else 0.0

    @property
    def messages(self) -> int:
        """Sequential messages that one device sends in all `times`."""
        return self.times * _SCHEDULES[self.kind](self.workers)[1]

    @property
    def where(self) -> str:
        """The user's line, or the named scopes of a method of this library."""
        return self.source or self.scope

    @property
    def in_loop(self) -> bool:
        """Whether it is in a loop."""
        return any(not part.startswith("cond ") for part in self.path)

    @property
    def is_overlapped(self) -> bool:
        """Whether a compiled program computes products while it is on the way."""
        return self.asynchronous and self.during.flops > 0

    @property
    def unbounded(self) -> bool:
        """Whether it is in a loop of unknown length."""
        return "while" in self.path


class Branches(NamedTuple):
    """The branches of a conditional, one of which runs."""

    branches: tuple[tuple["Collective | Branches", ...], ...]


Node = Collective | Branches
Cost = Callable[[list[Collective]], float]


def bytes_of(collectives: list[Collective]) -> float:
    """Returns the bytes that one device sends."""
    return sum(collective.bytes_per_worker for collective in collectives)


def messages_of(collectives: list[Collective]) -> int:
    """Returns the number of sequential messages; combined collectives count once."""
    return sum({c.group: c.messages for c in collectives}.values())


def messages_sent(collectives: list[Collective]) -> int:
    """Returns the number of messages that are sent; combined collectives count once."""
    return sum({c.group: c.times for c in collectives}.values())


def flat(nodes: tuple[Node, ...]) -> Iterator[Collective]:
    """Yields all collectives, of every branch."""
    for node in nodes:
        if isinstance(node, Collective):
            yield node
        else:
            for branch in node.branches:
                yield from flat(branch)


def amortized(nodes: tuple[Node, ...], share: float) -> float:
    """Returns the bytes if conditionals take the heaviest branch in `share` of the runs."""
    total = 0.0
    for node in nodes:
        if isinstance(node, Collective):
            total += node.bytes_per_worker
        else:
            each = [amortized(branch, share) for branch in node.branches]
            total += share * max(each) + (1 - share) * min(each)
    return total


def heaviest(nodes: tuple[Node, ...], cost: Cost) -> list[Collective]:
    """Returns the collectives that run if every conditional takes its most costly branch."""
    taken: list[Collective] = []
    for node in nodes:
        if isinstance(node, Collective):
            taken.append(node)
        else:
            each = [heaviest(branch, cost) for branch in node.branches]
            costs = [cost(branch) for branch in each]
            taken += each[costs.index(max(costs))]
    return taken
