"""Reads the text of a compiled program: its instructions in the order in which they run."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxcomm.wire._source import Line, user_line

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*|token)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation"
    r"|false_computation)=(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SOURCE = re.compile(r"\b(?:source_file|stack_frame_id)=")
_WHOLE = re.compile(r"p?jit\([^/]*\)")
_HEADER = re.compile(r"\b(replica_count|num_partitions)=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_NUMBERS = re.compile(r"(\w+)=(\d+)")
_COUNTS = "compare", "tuple"  # The roots of the condition and the body of a loop that counts.
_FREE = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "constant",
    "after-all",
    "partition-id",
}


class Work(NamedTuple):
    """What instructions compute and move."""

    flops: float
    bytes: float


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    type: str
    opcode: str
    rest: str  # operands and attributes
    operands: tuple[str, ...]
    computation: str
    is_root: bool = False

    def __str__(self) -> str:
        return f"%{self.name} = {self.type} {self.opcode}({self.rest}"

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it calls."""
        return tuple(
            name.strip(" %")
            for several, one in _CALLED.findall(self.rest)
            for name in (several or one).split(",")
        )

    @property
    def op_name(self) -> str:
        """The operation of the traced program from which it comes, with its named scopes."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return found[1] if found else ""

    @property
    def is_backward(self) -> bool:
        """Whether it comes from the transpose of the derivative of a function."""
        return "transpose(" in self.op_name


@functools.lru_cache(10_000)
def shapes(type_: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The dtype and the dimensions of each array of a type such as `(f32[2,3]{1,0}, s8[4]{0})`."""
    return tuple(
        (dtype, tuple(int(n) for n in dims.split(",") if n))
        for dtype, dims in _ARRAY.findall(type_)
    )


def _itemsize(dtype: str) -> float:
    if dtype in ("token", "opaque"):
        return 0
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else int(bits[0]) / 8


@functools.lru_cache(10_000)
def bytes_of(type_: str) -> float:
    """The bytes of all arrays of a type."""
    return sum(math.prod(dims) * _itemsize(dtype) for dtype, dims in shapes(type_))


class Program:
    """The computations of a compiled program, each with its instructions in order.

    Raises:
      ValueError: If the text is not that of a compiled program.
    """

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        self.counts = {"replica_count": 1, "num_partitions": 1}
        self._tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        current = table = ""
        for line in text.splitlines():
            if current and (found := _INSTRUCTION.match(line)):
                root, name, type_, opcode, rest = found.groups()
                operands = tuple(re.findall(r"%([\w.\-]+)", rest.split("), ", 1)[0]))
                self.computations[current].append(
                    Instruction(name, type_, opcode, rest, operands, current, bool(root))
                )
            elif begins := _COMPUTATION.match(line):
                current = begins[2]
                self.computations[current] = []
                self.entry = current if begins[1] else self.entry
            elif line in _TABLES:
                table = line
            elif table and line[:1].isdigit():
                number, _, entry = line.partition(" ")
                self._tables[table][int(number)] = entry
            elif line.startswith("HloModule"):
                self.counts |= {key: int(n) for key, n in _HEADER.findall(line)}
        if not self.entry:
            raise ValueError("Pass the compiled program, `jax.jit(step).lower(...).compile()`.")

    @functools.cached_property
    def mesh(self) -> dict[str, int]:
        """The mesh of most axes that the groups of a collective name."""
        count = math.prod(self.counts.values())
        meshes = [
            {name: int(size) for name, size in re.findall(r"'?([^'=,]+)'?=(\d+)", axes)}
            for each in itertools.chain(*self.computations.values())
            for axes in re.findall(r"replica_groups=mesh\[([^\]]*)\] ", each.rest)
        ]
        whole = [mesh for mesh in meshes if math.prod(mesh.values()) == count]
        return max(whole, key=len, default={})

    @functools.cached_property
    def _named(self) -> dict[str, dict[str, Instruction]]:
        return {
            name: {each.name: each for each in instructions}
            for name, instructions in self.computations.items()
        }

    @functools.cached_property
    def _frames(self) -> dict[int, tuple[Line, int]]:
        """The line of each frame, and the number of the one that called it."""
        numbers = {
            table: {n: dict(_NUMBERS.findall(entry)) for n, entry in self._tables[table].items()}
            for table in _TABLES[2:]
        }
        frames = numbers["StackFrames"]
        # Some versions print the number of the caller plus one, so that a root is its own caller.
        plus = any(int(frame.get("parent_frame_id", 0)) == n for n, frame in frames.items())
        found = {}
        for number, frame in frames.items():
            location = numbers["FileLocations"].get(int(frame["file_location_id"]), {})
            file = self._tables["FileNames"].get(int(location.get("file_name_id", 0)), "")
            line = Line(file.strip('"'), int(location.get("line", 0)))
            found[number] = line, int(frame.get("parent_frame_id", 0)) - plus
        return found

    def lines(self, each: Instruction) -> list[Line]:
        """The lines of source from which an instruction comes, the innermost first."""
        if named := re.search(r'source_file="([^"]*)"', each.rest):
            number = re.search(r"source_line=(\d+)", each.rest)
            return [Line(named[1], int(number[1]) if number else 0)]
        found = re.search(r"stack_frame_id=(\d+)", each.rest)
        frame, lines = int(found[1]) if found else 0, []
        while frame in self._frames:
            line, frame = self._frames[frame]
            lines.append(line)
        return lines

    @functools.cached_property
    def _users(self) -> dict[tuple[str, str], list[Instruction]]:
        users: dict[tuple[str, str], list[Instruction]] = {}
        for each in itertools.chain(*self.computations.values()):
            for name in each.operands:
                users.setdefault((each.computation, name), []).append(each)
        return users

    def users(self, each: Instruction) -> list[Instruction]:
        """The instructions that read its result."""
        return self._users.get((each.computation, each.name), [])

    def operand(self, each: Instruction, number: int) -> Instruction | None:
        """The instruction whose result is an operand."""
        if number >= len(each.operands):
            return None
        return self._named[each.computation].get(each.operands[number])

    def origin(self, each: Instruction) -> Instruction:
        """The instruction, or the nearest that reads its result or computes it, with a source.

        XLA leaves out the source of some collectives that it inserts; others have that of the whole
        program, which is named `jit(step)` without an operation.
        """
        whole = each
        for neighbors in (self.users, self.operands):
            near = [each]
            for one in near:  # Grows meanwhile: the nearest come first.
                if _SOURCE.search(one.rest):
                    if not _WHOLE.fullmatch(one.op_name):
                        return one
                    whole = one if whole is each else whole
                if len(near) < 64:
                    near += [other for other in neighbors(one) if other not in near]
        return whole

    def operands(self, each: Instruction) -> list[Instruction]:
        """The instructions whose results are its operands."""
        found = (self.operand(each, number) for number in range(len(each.operands)))
        return [x for x in found if x is not None]

    def source(self, each: Instruction) -> str:
        """The user's line of source from which an instruction comes; empty if unknown."""
        return user_line(self.lines(each))

    def operand_type(self, each: Instruction, number: int) -> str:
        """The type of an operand."""
        found = self.operand(each, number)
        return found.type if found else ""

    def trips(self, each: Instruction) -> int | None:
        """How often a loop runs; None if the program does not say it."""
        if found := _TRIPS.search(each.rest):
            return int(found[1])
        return self._counted(each)

    def _counted(self, loop: Instruction) -> int | None:
        """The trips of a loop whose counter grows by a constant up to a constant."""
        attributes = dict(re.findall(r"\b(condition|body)=%?([\w.\-]+)", loop.rest))
        condition, body = (
            self.computations.get(attributes.get(x, ""), []) for x in ("condition", "body")
        )
        compared, root = _root(condition), _root(body)
        if compared is None or root is None or (compared.opcode, root.opcode) != _COUNTS:
            return None
        limits = re.search(r"direction=(LT|LE)\b", compared.rest)
        counter, limit = (self._copied(compared, number) for number in (0, 1))
        index = index_of(counter)
        added = None if index is None else self._copied(root, index)
        if limits is None or index is None or added is None or added.opcode != "add":
            return None
        either = [self._copied(added, number) for number in (0, 1)]
        steps = [x for x in either if index_of(x) != index]
        begin = self._initial(loop, index)
        end = self._value(limit, loop, root)
        step = self._value(steps[0], loop, root) if len(steps) == 1 else None
        if begin is None or end is None or step is None or step <= 0:
            return None
        return max(0, -(-(end + (limits[1] == "LE") - begin) // step))

    def _copied(self, each: Instruction, number: int) -> Instruction | None:
        """The instruction of which an operand is the result, or a copy of it."""
        found = self.operand(each, number)
        while found is not None and found.opcode in ("copy", "bitcast"):
            found = self.operand(found, 0)
        return found

    def _initial(self, loop: Instruction, index: int) -> int | None:
        """The value of an element of the tuple with which a loop begins, if it is a constant."""
        given = self.operand(loop, 0)
        is_tuple = given is not None and given.opcode == "tuple"
        return _constant(self._copied(given, index)) if given and is_tuple else None

    def _value(self, each: Instruction | None, loop: Instruction, root: Instruction) -> int | None:
        """The value of a constant in a loop, also of one that the loop carries unchanged."""
        index = index_of(each)
        if index is None:
            return _constant(each)
        is_kept = index_of(self._copied(root, index)) == index
        return self._initial(loop, index) if is_kept else None

    def _product_flops(self, each: Instruction) -> float:
        """The operations of a product of matrices or a convolution."""
        results = shapes(each.type)
        if not results:
            return 0
        size = math.prod(results[0][1])
        if labels := re.search(r"dim_labels=\w+?_(\w+)->", each.rest):
            kernel = shapes(self.operand_type(each, 1))
            sizes = kernel[0][1] if kernel else ()
            inner = [n for n, label in zip(sizes, labels[1], strict=False) if label != "o"]
            return 2 * size * math.prod(inner)
        found = re.search(r"lhs_contracting_dim(?:s=\{|ensions\":\[)([\d,\"]*)", each.rest)
        left = shapes(self.operand_type(each, 0))
        if not found or not left:
            return 0
        dims = [int(n) for n in re.findall(r"\d+", found[1])]
        return 2 * size * math.prod(left[0][1][n] for n in dims if n < len(left[0][1]))

    def _moved(self, each: Instruction) -> float:
        """The bytes read and written; of an array that is sliced or updated, only the slice."""
        sizes = [bytes_of(self.operand_type(each, i)) for i in range(len(each.operands))]
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
            part = bytes_of(self.operand_type(found, 1) if updates else found.type)
            if updates:
                written = min(written, written - bytes_of(found.type) + part)
            if (number := names.get(found.operands[0])) is not None and number < len(sizes):
                sizes[number] = min(sizes[number], part)
        return written + sum(sizes)

    def _flops(self, computation: str) -> float:
        return sum(self.cost(each).flops for each in self.computations.get(computation, ()))

    def cost(self, each: Instruction) -> Work:
        """The operations of products, and the bytes read and written; loops count all trips."""
        if each.opcode in _FREE:
            return Work(0, 0)
        if each.opcode == "while":
            inside = [self.computations.get(name, []) for name in each.called]
            costs = [self.cost(inner) for inner in itertools.chain(*inside)]
            trips = self.trips(each) or 1
            return Work(trips * sum(c.flops for c in costs), trips * sum(c.bytes for c in costs))
        moved = self._moved(each)
        if each.opcode in ("dot", "convolution") or "$matmul" in each.rest or "$gemm" in each.rest:
            return Work(self._product_flops(each), moved)
        return Work(sum(map(self._flops, each.called)), moved)

    def computations_that_run(self) -> Iterator[tuple[str, int]]:
        """The entry, the bodies of loops and all branches, with how often each runs at most."""
        pending = [(self.entry, 1)]
        while pending:
            name, times = pending.pop()
            yield name, times
            for each in self.computations[name]:
                if each.opcode in ("while", "conditional", "call"):
                    trips = self.trips(each) or 1 if each.opcode == "while" else 1
                    pending += [(body, times * trips) for body in each.called]


def _root(instructions: Sequence[Instruction]) -> Instruction | None:
    return next((each for each in instructions if each.is_root), None)


def _constant(each: Instruction | None) -> int | None:
    found = re.match(r"(-?\d+)\)", each.rest) if each and each.opcode == "constant" else None
    return int(found[1]) if found else None


def index_of(each: Instruction | None) -> int | None:
    """Which element of a tuple an instruction reads."""
    found = re.search(r"\bindex=(\d+)", each.rest) if each else None
    return int(found[1]) if found and each and each.opcode == "get-tuple-element" else None
