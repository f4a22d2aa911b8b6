"""What XLA for CPUs sends as wider numbers than other devices do."""

import re
from collections.abc import Iterable

from jaxcomm.wire._compiled import Instruction, Program, index_of, shapes

_NARROW = {"f32": re.compile("bf16"), "f16": re.compile("f[48]")}
_MOVES = ("bitcast", "copy", "reshape", "transpose", "tuple", "get-tuple-element")
_DEPTH = 8


def narrow(program: Program, each: Instruction, number: int, sent: str) -> str:
    """The dtype that other devices send for an operand of a collective, such as `"bf16"`.

    XLA marks a sum as promoted if it has widened it from bfloat16. A sum of several arrays has the
    mark of one of them: an array of it is narrow if it is converted before or after the message, or
    is a product of narrow factors. Another message is narrow if its operand is converted without a
    name. An operation with a name is in the program, which sends a wide number then, unless it
    converts the result back, too.

    Args:
      program: The compiled program.
      each: The collective.
      number: The operand.
      sent: Its dtype.
    """
    operand = program.operand(each, number)
    if sent not in _NARROW or operand is None:
        return sent
    conversion = _conversion(program, operand)
    near = _dtypes(program, conversion)
    if sent == "f32" and "to_apply=" in each.rest:
        is_promoted = re.search(r"to_apply=%?[\w.\-]*promoted", each.rest) is not None
        if len(each.operands) == 1:
            return "bf16" if is_promoted else sent
        parts = [x for x in program.users(each) if re.search(rf"\bindex={number}\b", x.rest)]
        after = _all(_used_as(program, part) for part in parts)
        near = near | after | _factors(program, operand) if is_promoted else after
    elif conversion is not None and conversion.op_name:
        near &= _used_as(program, each)
    return next(filter(_NARROW[sent].match, sorted(near)), sent)


def _all(dtypes: Iterable[set[str]]) -> set[str]:
    """The dtypes that are in all of several sets; none if there are no sets."""
    found = [*dtypes]
    return set.intersection(*found) if found else set()


def _root(program: Program, each: Instruction) -> Instruction:
    """The instruction; of a fusion the one inside whose result is that of the fusion."""
    inside = program.computations.get(each.called[0], []) if each.opcode == "fusion" else []
    return next((inner for inner in inside if inner.is_root), each)


def _conversion(
    program: Program, each: Instruction | None, index: int | None = None, depth: int = _DEPTH
) -> Instruction | None:
    """The conversion of which only the place in memory changes until the result."""
    root = None if each is None else _root(program, each)
    if root is None or root.opcode == "convert":
        return root
    if not depth or root.opcode not in _MOVES:
        return None
    number = index or 0 if root.opcode == "tuple" else 0
    return _conversion(program, program.operand(root, number), index_of(root), depth - 1)


def _dtypes(program: Program, conversion: Instruction | None) -> set[str]:
    """The dtypes between which a conversion converts."""
    types = conversion and conversion.type + program.operand_type(conversion, 0)
    return {dtype for dtype, _ in shapes(types or "")}


def _factors(program: Program, each: Instruction) -> set[str]:
    """The dtypes of conversions that both factors of a product have."""
    if _root(program, each).opcode not in ("dot", "convolution"):
        return set()
    factors = [program.operand(each, number) for number in range(len(each.operands))]
    return _all(_dtypes(program, _conversion(program, x)) for x in factors)


def _used_as(program: Program, each: Instruction, depth: int = _DEPTH) -> set[str]:
    """The dtypes to which all uses of a result convert it."""

    def of(use: Instruction) -> set[str]:
        if use.opcode == "convert":
            return {shapes(use.type)[0][0]}
        if depth and use.opcode in _MOVES:
            return _used_as(program, use, depth - 1)
        inside = program.computations.get(use.called[0], []) if use.opcode == "fusion" else []
        inputs = [x for x in inside if x.opcode == "parameter"]
        given = [x for x in inputs if use.operands[int(x.rest.split(")")[0])] == each.name]
        return _all(_used_as(program, x, depth - 1) for x in given) if depth else set()

    return _all(map(of, program.users(each)))
