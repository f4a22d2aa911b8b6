"""Finds the messages of a compiled program: its collectives, and what it computes meanwhile."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxcomm.wire._collective import Branches, Collective, Node
from jaxcomm.wire._compiled import Instruction, Program, Work, shapes
from jaxcomm.wire._groups import Groups, axes_of, groups_of, pairs_of
from jaxcomm.wire._source import first_of, is_ours, scope_of
from jaxcomm.wire._widened import narrow

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "ppermute",
    "collective-broadcast": "broadcast",
    "send": "ppermute",
}
_SIMILAR = re.compile(r"(all|collective|reduce-scatter|ragged)-")
_NO_MESSAGE = ("recv", "send-done", "recv-done", "partition-id", "replica-id")
_CALLS = ("fusion", "async-start", "custom-call")
_RUNS = (*_CALLS, "while", "conditional", "call")
_ONE_OPERAND = ("ragged-all-to-all", "send")  # The others are sizes, offsets and tokens.
_ASYNCHRONOUS = re.compile(r'custom_call_target="AsyncCollective(Start|Done)"')
_FUSED = '"async_collective_fusion_config"'
_DTYPES = {"pred": "bool", "bf16": "bfloat16", "c64": "complex64", "c128": "complex128"}
_LETTERS = {"f": "float", "s": "int", "u": "uint"}


class Message(NamedTuple):
    """A collective of a compiled program, as one instruction or from a start to a done."""

    opcode: str  # without "-start"
    each: Instruction  # the collective itself, which may be in a fusion
    outer: Instruction  # the instruction of the computation that runs, which has it inside
    begin: int  # the position of the start in this computation
    end: int  # and of the done, the same if there is none

    @property
    def is_asynchronous(self) -> bool:
        return self.end > self.begin


def _dtype(name: str) -> np.dtype:
    """The dtype of `f32`, `s8` or `f8e4m3fn`."""
    known = _DTYPES.get(name)
    if known is None and (parts := re.fullmatch(r"([fsu])(\d+)", name)):
        known = f"{_LETTERS[parts[1]]}{parts[2]}"
    return jnp.dtype(known or name.replace("f8", "float8_", 1).replace("f4", "float4_", 1))


def _opcode_of(each: Instruction) -> str:
    """The collective that an instruction starts or runs; empty if there is none.

    Raises:
      ValueError: If it seems to be a collective of a kind that is not known.
    """
    opcode = each.opcode.removesuffix("-start")
    if opcode in KINDS:
        return "" if "is_host_transfer=true" in each.rest else opcode
    done = each.opcode.endswith(("-done", "-update")) or each.opcode in _NO_MESSAGE
    if not done and _SIMILAR.match(each.opcode):
        raise ValueError(f"This collective is of an unknown kind: {each}")
    return ""


def _inside(program: Program, each: Instruction) -> Iterator[tuple[str, Instruction]]:
    """The collectives of an instruction: itself, or those of the computations that it calls."""
    if opcode := _opcode_of(each):
        yield opcode, each
    elif each.opcode in _CALLS:
        for name in each.called:
            for inner in program.computations.get(name, ()):
                yield from _inside(program, inner)


def _continues(program: Program, each: Instruction) -> bool:
    """Whether a collective in a fusion is the middle or the end of a message, as on TPU."""
    around = program.computations[each.computation]
    targets = {x for one in around for x in _ASYNCHRONOUS.findall(one.rest)}
    return "Start" not in targets and ("Done" in targets or _FUSED in each.rest)


def _done(program: Program, each: Instruction) -> Instruction:
    """The instruction at which the result of a start is awaited."""
    for user in program.users(each):
        if user.opcode.endswith("-update"):
            return _done(program, user)
        if user.opcode.endswith("-done"):
            return user
    return each


def messages_in(program: Program, name: str) -> list[Message]:
    """The messages of a computation, in the order of their starts, without loops and branches."""
    instructions = program.computations[name]
    places = {each.name: place for place, each in enumerate(instructions)}
    found: dict[str, Message] = {}
    message_of: dict[str, str] = {}  # Of instructions that read a message in fusions.
    for place, outer in enumerate(instructions):
        if outer.opcode == "get-tuple-element" and outer.operands[0] in message_of:
            message_of[outer.name] = message_of[outer.operands[0]]
        for opcode, each in _inside(program, outer):
            key = f"{outer.name} {each.name}"
            if each is not outer and _continues(program, each):
                key = next((message_of[x] for x in outer.operands if x in message_of), key)
            message_of[outer.name] = key
            if key in found:
                found[key] = found[key]._replace(end=place)
                continue
            waits = '"is_sync":true' in outer.rest  # XLA for GPUs runs the pair as one.
            begins = not waits and (outer.opcode.endswith("-start") or opcode == "send")
            end = places[_done(program, outer).name] if begins else place
            found[key] = Message(opcode, each, outer, place, end)
    return [*found.values()]


class _Reader:
    """Reads the collectives of a program, each with the control flow around it."""

    def __init__(self, program: Program, sizes: Mapping[str, int], widens: bool):
        self.program, self.sizes, self.widens = program, sizes, widens
        self.groups = itertools.count()

    def nodes(self, name: str, times: int, path: tuple[str, ...]) -> list[Node]:
        """The collectives of a computation, and those of its loops and branches."""
        instructions = self.program.computations[name]
        messages: dict[int, list[Message]] = {}
        for message in messages_in(self.program, name):
            messages.setdefault(message.begin, []).append(message)
        found: list[Node] = []
        costs: list[Work] = []
        if any(each.is_asynchronous for each in itertools.chain(*messages.values())):
            costs = [self._cost(each) for each in instructions]
        for place, each in enumerate(instructions):
            for message in messages.get(place, ()):
                between = costs[message.begin + 1 : message.end]
                during = Work(sum(c.flops for c in between), sum(c.bytes for c in between))
                found += self._collectives(message, times, path, during)
            if each.opcode == "while":
                found += self._loop(each, times, path)
            elif each.opcode == "conditional":
                inside = [x for x in each.called if x in self.program.computations]
                branches = [
                    self.nodes(branch, times, (*path, f"cond {i}/{len(inside)}"))
                    for i, branch in enumerate(inside, 1)
                ]
                if any(branches):
                    found.append(Branches(tuple(map(tuple, branches))))
            elif each.opcode == "call":
                for called in each.called:
                    found += self.nodes(called, times, path)
        return found

    def _cost(self, each: Instruction) -> Work:
        """What an instruction computes; a message computes nothing, but a fusion around it may."""
        sends = _opcode_of(each) or each.opcode.endswith("-done")
        return Work(0, 0) if sends else self.program.cost(each)

    def _loop(self, each: Instruction, times: int, path: tuple[str, ...]) -> list[Node]:
        trips = self.program.trips(each)
        around = (*path, "while" if trips is None else f"scan x{trips}")
        found: list[Node] = []
        for name in each.called:
            more = re.search(rf"condition=%?{re.escape(name)}(?![\w.\-])", each.rest)
            runs = 1 if trips is None else trips + bool(more)
            found += self.nodes(name, times * runs, around)
        return found

    def _collectives(
        self, message: Message, times: int, path: tuple[str, ...], during: Work
    ) -> list[Collective]:
        program, each = self.program, message.each
        counts = program.counts["replica_count"], program.counts["num_partitions"]
        kind = KINDS[message.opcode]
        pairs: Groups = ()
        if kind == "ppermute":
            pairs = tuple(pair for pair in pairs_of(str(each), *counts) if pair[0] != pair[1])
            groups = pairs
        else:
            groups = groups_of(message.opcode, str(each), *counts)
        axes = axes_of(groups, self.sizes)
        workers = max(map(len, groups), default=1)
        if pairs:
            known = axes and set(axes) <= set(self.sizes)
            workers = math.prod(self.sizes[x] for x in axes) if known else math.prod(counts)
        if workers == 1:
            return []
        if each is not message.outer and each.computation.startswith("all-reduce-scatter"):
            kind = "reduce_scatter"
        count = 1 if message.opcode in _ONE_OPERAND else len(each.operands)
        types = [program.operand_type(each, number) for number in range(count)]
        arrays = [array for type_ in types for array in shapes(type_)]
        if message.opcode == "all-to-all" and "dimensions=" not in each.rest:
            arrays = [_joined(arrays)]  # Its operands are the parts for each device.
        described = program.origin(each)
        if not program.lines(described):
            described = program.origin(message.outer)
        lines = program.lines(described)
        group = next(self.groups)
        found = []
        for number, (name, shape) in enumerate(arrays):
            sent = _dtype(name)
            meant = _dtype(narrow(program, each, number, name)) if self.widens else sent
            found.append(
                Collective(
                    kind,
                    axes,
                    workers,
                    meant,
                    shape,
                    times,
                    path,
                    group,
                    pairs=pairs,
                    source="" if is_ours(lines) else program.source(described),
                    scope=scope_of(first_of(described.op_name).rpartition("/")[0]),
                    combined=len(arrays),
                    asynchronous=message.is_asynchronous,
                    during=during,
                    widened=sent if meant != sent else None,
                )
            )
        return found


def _require_reached(program: Program) -> None:
    """Raises if a collective is in a computation that nothing known runs."""
    reached: set[str] = set()
    pending = [program.entry]
    while pending:
        name = pending.pop()
        if name in program.computations and name not in reached:
            reached.add(name)
            calls = (each for each in program.computations[name] if each.opcode in _RUNS)
            pending += [called for each in calls for called in each.called]
    for name in program.computations.keys() - reached:
        for each in program.computations[name]:
            if _opcode_of(each):
                raise ValueError(f"It is not known what runs this collective: {each}")


def _joined(parts: list[tuple[str, tuple[int, ...]]]) -> tuple[str, tuple[int, ...]]:
    """The array that consists of equal parts, along its first dimension."""
    dtype, shape = parts[0]
    return dtype, (len(parts) * shape[0], *shape[1:]) if shape else (len(parts),)


def nodes_of(
    program: Program, sizes: Mapping[str, int], *, widens: bool = False
) -> tuple[Node, ...]:
    """The collectives of a compiled program.

    Args:
      program: The program.
      sizes: The axes of its mesh in the order of its devices, with their sizes.
      widens: Whether XLA for CPUs has compiled it, which sends narrow floats as wider ones: a
        message counts as its narrow dtype then, as on other devices.

    Raises:
      ValueError: If a collective, its groups, or what runs it are of a form that is not known.
    """
    _require_reached(program)
    return tuple(_Reader(program, sizes, widens).nodes(program.entry, 1, ()))
