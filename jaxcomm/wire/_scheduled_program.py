"""Reads the text of a compiled program: its instructions in the order in which they run."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*|token)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation"
    r"|false_computation)=(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_FREE = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "constant",
    "after-all",
    "partition-id",
}


class Cost(NamedTuple):
    """What an instruction computes and moves."""

    flops: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    type: str
    opcode: str
    rest: str  # operands and attributes
    operands: tuple[str, ...]
    computation: str

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it calls."""
        return tuple(
            name.strip(" %")
            for several, one in _CALLED.findall(self.rest)
            for name in (several or one).split(",")
        )

    @property
    def is_backward(self) -> bool:
        """Whether it comes from the transpose of the derivative of a function."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return bool(found) and "transpose(" in found[1]  # type: ignore[index]


def _shapes(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (dtype, tuple(int(n) for n in dims.split(",") if n))
        for dtype, dims in _ARRAY.findall(type_)
    ]


def _itemsize(dtype: str) -> float:
    if dtype in ("token", "opaque"):
        return 0
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else int(bits[0]) / 8


def bytes_of(type_: str) -> float:
    """The bytes of all arrays of a type such as `(f32[2,3]{1,0}, s8[4]{0})`."""
    return sum(math.prod(dims) * _itemsize(dtype) for dtype, dims in _shapes(type_))


class Program:
    """The computations of a compiled program, each with its instructions in order."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current = ""
        for line in text.splitlines():
            if begins := _COMPUTATION.match(line):
                current = begins[2]
                self.computations[current] = []
                self.entry = current if begins[1] else self.entry
            elif current and (found := _INSTRUCTION.match(line)):
                name, type_, opcode, rest = found.groups()
                operands = tuple(re.findall(r"%([\w.\-]+)", rest.split("), ")[0]))
                self.computations[current].append(
                    Instruction(name, type_, opcode, rest, operands, current)
                )
        if not self.entry:
            raise ValueError("Pass the compiled program, `jax.jit(step).lower(...).compile()`.")
        self._types = {
            (each.computation, each.name): each.type
            for instructions in self.computations.values()
            for each in instructions
        }

    def _operand_type(self, each: Instruction, number: int) -> str:
        if number >= len(each.operands):
            return ""
        return self._types.get((each.computation, each.operands[number]), "")

    def trips(self, each: Instruction) -> int:
        """How often a loop runs; 1 if the program does not say it."""
        found = _TRIPS.search(each.rest)
        return int(found[1]) if found else 1

    def _product_flops(self, each: Instruction) -> float:
        """The operations of a product of matrices or a convolution."""
        results = _shapes(each.type)
        if not results:
            return 0
        size = math.prod(results[0][1])
        if labels := re.search(r"dim_labels=\w+?_(\w+)->", each.rest):
            kernel = _shapes(self._operand_type(each, 1))
            sizes = kernel[0][1] if kernel else ()
            inner = [n for n, label in zip(sizes, labels[1], strict=False) if label != "o"]
            return 2 * size * math.prod(inner)
        found = re.search(r"lhs_contracting_dim(?:s=\{|ensions\":\[)([\d,\"]*)", each.rest)
        left = _shapes(self._operand_type(each, 0))
        if not found or not left:
            return 0
        dims = [int(n) for n in re.findall(r"\d+", found[1])]
        return 2 * size * math.prod(left[0][1][n] for n in dims if n < len(left[0][1]))

    def _moved(self, each: Instruction) -> float:
        """The bytes read and written; of an array that is sliced or updated, only the slice."""
        sizes = [bytes_of(self._operand_type(each, i)) for i in range(len(each.operands))]
        written = bytes_of(each.type)
        inner = self.computations.get(each.called[0], []) if each.opcode == "fusion" else [each]
        names = {
            found.name: int(found.rest.split(")")[0])
            for found in inner
            if found.opcode == "parameter" and each.opcode == "fusion"
        } or {name: number for number, name in enumerate(each.operands)}
        for found in inner:
            updates = found.opcode == "dynamic-update-slice"
            if not (updates or found.opcode == "dynamic-slice") or not found.operands:
                continue
            part = bytes_of(self._operand_type(found, 1) if updates else found.type)
            if updates:
                written = min(written, written - bytes_of(found.type) + part)
            if (number := names.get(found.operands[0])) is not None and number < len(sizes):
                sizes[number] = min(sizes[number], part)
        return written + sum(sizes)

    def _flops(self, computation: str) -> float:
        return sum(self.cost(each).flops for each in self.computations.get(computation, ()))

    def cost(self, each: Instruction) -> Cost:
        """The operations of products, and the bytes read and written; loops count all trips."""
        if each.opcode in _FREE:
            return Cost(0, 0)
        if each.opcode == "while":
            inside = [self.computations.get(name, []) for name in each.called]
            costs = [self.cost(inner) for inner in itertools.chain(*inside)]
            trips = self.trips(each)
            return Cost(trips * sum(c.flops for c in costs), trips * sum(c.bytes for c in costs))
        moved = self._moved(each)
        if each.opcode in ("dot", "convolution") or "$matmul" in each.rest or "$gemm" in each.rest:
            return Cost(self._product_flops(each), moved)
        return Cost(sum(map(self._flops, each.called)), moved)

    def computations_that_run(self) -> Iterator[tuple[list[Instruction], int]]:
        """The entry, the bodies of loops and all branches, with how often each runs at most."""
        pending = [(self.entry, 1)]
        while pending:
            name, times = pending.pop()
            instructions = self.computations[name]
            yield instructions, times
            for each in instructions:
                if each.opcode in ("while", "conditional", "call"):
                    pending += [(body, times * self.trips(each)) for body in each.called]
