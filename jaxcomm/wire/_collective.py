"""The cost of a collective, also in conditionals; collectives that XLA inserts by itself."""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import NamedSharding

from jaxcomm.wire._program import inlined, is_literal, manual_axes, named_axes

# For ring schedules: bytes sent per worker over bytes of the operand, and sequential messages.
_SCHEDULES: dict[str, Callable[[int], tuple[float, int]]] = {
    "all_reduce": lambda n: (2 * (n - 1) / n, 2 * (n - 1)),
    "reduce_scatter": lambda n: ((n - 1) / n, n - 1),
    "all_to_all": lambda n: ((n - 1) / n, n - 1),
    "all_gather": lambda n: (float(n - 1), n - 1),
    "ppermute": lambda n: (1.0, 1) if n > 1 else (0.0, 0),
}


class Collective(NamedTuple):
    """One operand of one collective, with the number of times that it runs."""

    primitive: str  # "all_reduce", "all_gather", "all_to_all", "reduce_scatter" or "ppermute"
    axes: tuple[str, ...]
    workers: int
    dtype: np.dtype
    shape: tuple[int, ...]  # of a device's own shard, if the operand's type has the sharding
    times: int  # how often it runs; an unbounded loop counts once
    path: tuple[str, ...]  # the control flow around it: "scan x5", "cond 1/2", "while"
    group: int  # compilers combine the collectives with one group number in one message
    automatic: tuple[str, ...] = ()  # axes over which XLA may have sharded the operand
    pairs: tuple[tuple[int, int], ...] = ()  # of a permutation: who sends to whom

    @property
    def bytes_per_worker(self) -> float:
        """Bytes that one device sends in all `times`; an upper bound if axes are automatic."""
        factor, _ = _SCHEDULES[self.primitive](self.workers)
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
        return self.times * _SCHEDULES[self.primitive](self.workers)[1]

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


_COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_LAYOUT = re.compile(r"\{[^}]*\}")

_UNKNOWN = object()
"""The layout of an array that is sharded in a way that the program does not say."""


def _layout_of(sharding: Any) -> Any:
    """The axes of each dimension, up to the last that is sharded; None if none is."""
    if isinstance(sharding, NamedSharding):
        return _named(sharding.spec, sharding.mesh.shape)
    replicated = getattr(sharding, "is_fully_replicated", True)
    return None if replicated else _UNKNOWN


def _named(spec: Any, sizes: Any, over: Any = None) -> Any:
    kept = [
        tuple(axis for axis in axes if sizes[axis] > 1 and (over is None or axis in over))
        for axes in named_axes(spec)
    ]
    while kept and not kept[-1]:
        kept.pop()
    return tuple(kept) or None


def is_partitioned(program: Any, arguments: Sequence[Any]) -> bool:
    """Whether XLA may insert collectives: an operation outside of `shard_map` on a sharded array.

    Args:
      program: Its closed jaxpr.
      arguments: Arrays or shapes, in its order.
    """
    return _walk(program.jaxpr, program.consts, _layouts_of(arguments)) is None


def _layouts_of(arrays: Sequence[Any]) -> list[Any]:
    return [_layout_of(getattr(x, "sharding", None)) for x in arrays]


def _walk(jaxpr: Any, consts: Sequence[Any], layouts: Sequence[Any]) -> list[Any] | None:
    """The layouts of the results, or None if XLA partitions an operation."""
    known = dict(zip(jaxpr.invars, layouts, strict=True))
    known |= dict(zip(jaxpr.constvars, _layouts_of(consts), strict=True))

    def find(atom: Any) -> Any:
        own = None if is_literal(atom) else known.get(atom)
        return own or _layout_of(getattr(atom.aval, "sharding", None))

    for eqn in jaxpr.eqns:
        ins = [find(atom) for atom in eqn.invars]
        name, params, inner = eqn.primitive.name, eqn.params, inlined(eqn)
        outs: list[Any] | None
        if name == "shard_map":
            sizes = params["mesh"].shape
            manual = manual_axes(params)
            given = [_named(spec, sizes) for spec in params["in_specs"]]
            own = [
                x if x in (None, _UNKNOWN) else _named(x, dict.fromkeys(sum(x, ()), 2), manual)
                for x in ins
            ]
            if any(x not in (None, y) for x, y in zip(own, given, strict=True)):
                return None
            outs = [_named(spec, sizes) for spec in params["out_specs"]]
        elif inner is not None:
            wanted = [_layout_of(x) for x in params.get("in_shardings", ())]
            pairs = itertools.zip_longest(wanted, ins)
            consts = next((x.consts for x in params.values() if hasattr(x, "consts")), ())
            outs = _walk(inner, consts, [x or y for x, y in pairs])
            if outs is None:
                return None
            returned = [*itertools.zip_longest(params.get("out_shardings", ()), outs)]
            for sharding, x in returned:
                if isinstance(sharding, NamedSharding) and x not in (None, _layout_of(sharding)):
                    return None
            outs = [_layout_of(s) or x for s, x in returned]
        elif name in ("sharding_constraint", "reshard"):
            outs = [_layout_of(params.get("sharding", params.get("dst_sharding")))]
            if ins[0] not in (None, outs[0]):
                return None
        elif any(x is not None for x in ins):
            return None
        else:
            outs = [None] * len(eqn.outvars)
        known |= dict(zip(eqn.outvars, outs, strict=True))
    return [find(atom) for atom in jaxpr.outvars]


def inserted(text: str) -> list[str]:
    """The collectives of a compiled program that are not from within a `jax.shard_map`."""
    found: dict[str, None] = {}
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        if match and "shard_map/" not in line.partition("op_name=")[2]:
            found[f"{match[2]} {_LAYOUT.sub('', match[1])}"] = None
    return [*found]
