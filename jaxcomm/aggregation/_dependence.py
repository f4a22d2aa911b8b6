"""What each coordinate of the results of a traced program depends on."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import numpy as np

from jaxcomm.wire._program import branches, inlined, is_literal, jaxprs, live

ELEMENTWISE = {
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh"),
    *("bessel_i0e", "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz"),
    *("convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to"),
    *("erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac"),
    *("integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "logistic", "lt"),
    *("lt_to", "max", "min", "mul", "name", "ne", "neg", "nextafter", "not", "or", "polygamma"),
    *("population_count", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n"),
    *("shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh"),
    *("sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta"),
}
# Of each operand, one result of the same shape.
IDENTITIES = {
    *("optimization_barrier", "pcast", "pvary", "device_put", "reshard", "sharding_constraint"),
}
# The identity if the shape does not change; of equal coordinates, they make equal coordinates.
SHAPED = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev", "slice"}


class Value(NamedTuple):
    """What the coordinates of an array depend on.

    `"same"`: they are equal, and equal on all workers. `"fixed"`: they depend on no gradient,
    parameter or state, but may depend on their position. `"element"`: each depends on the same
    coordinate of gradients, parameters and state only.
    """

    kind: Literal["same", "fixed", "element"]
    where: str = ""  # The leaf on which an element depends.


Calls: TypeAlias = tuple[Any, ...]  # An operation, after those that contain it.
_SAME, _FIXED = Value("same"), Value("fixed")


def refuse(why: str) -> NoReturn:
    raise ValueError(
        "`tx` of `sharded_server` must be element-wise, since a worker has only its slice of each "
        f"gradient, parameter and state, but {why}. Keep such an optimizer whole on each worker: "
        "`optax.chain(jaxcomm.two_stage_mean(codec), tx)`. To clip the mean gradient by its "
        "global norm, pass `max_norm` to `sharded_server`."
    )


def named(where: str) -> str:
    return f"the leaf at {where}" if where else "a leaf"


def source(calls: Sequence[Any]) -> str:
    """The line outside of JAX that applies an operation, if JAX recorded it.

    Args:
      calls: The operation, after the calls that contain it.
    """
    for eqn in reversed(calls):
        traceback = getattr(getattr(eqn, "source_info", None), "traceback", None)
        for frame in getattr(traceback, "frames", ()):
            name = str(frame.file_name).replace("\\", "/")
            if "/jax/" not in name and "/jaxcomm/" not in name:
                path = "/".join(name.split("/site-packages/")[-1].split("/")[-4:])
                return f" (in `{frame.function_name}`, {path}:{frame.line_num})"
    return ""


def _size(atom: Any) -> int:
    return math.prod(np.shape(atom.val) if is_literal(atom) else atom.aval.shape)


def shape_of(atom: Any) -> tuple[int, ...]:
    return tuple(np.shape(atom.val) if is_literal(atom) else atom.aval.shape)


def _joined(one: Value, other: Value) -> Value:
    """What a value depends on that may be either."""
    if one.kind == other.kind or other.kind == "same":
        return one
    if one.kind == "same":
        return other
    refuse(
        f"{named(one.where or other.where)} is replaced by an array that depends on the position "
        "of a coordinate"
    )


def loop(values: list[Value], body: Callable[[list[Value]], list[Value]]) -> list[Value]:
    """What the carry of a loop depends on after any number of turns."""
    while True:
        after = [_joined(*pair) for pair in zip(values, body(values), strict=True)]
        if [value.kind for value in after] == [value.kind for value in values]:
            return after
        values = after


def _scan(calls: Calls, ins: list[Value]) -> list[Value]:
    eqn = calls[-1]
    (body,) = jaxprs(eqn.params["jaxpr"])
    # Scanned operands have one more axis outside; the others are constants, then carries.
    whole = [len(shape_of(x)) == y.aval.ndim for x, y in zip(eqn.invars, body.invars, strict=True)]
    carries = sum(
        x.aval.ndim == len(shape_of(y)) for x, y in zip(eqn.outvars, body.outvars, strict=True)
    )
    consts = sum(whole) - carries
    for value in ins[consts + carries :]:
        if value.kind == "element":
            refuse(f"it scans over the first axis of {named(value.where)}{source(calls)}")

    def turn(carry: list[Value]) -> list[Value]:
        return results_of(body, [*ins[:consts], *carry, *ins[consts + carries :]], calls)

    carry = loop(ins[consts : consts + carries], lambda now: turn(now)[:carries])
    stacked = turn(carry)[carries:]
    for value in stacked:
        if value.kind == "element":
            refuse(f"it stacks values of {named(value.where)}{source(calls)}")
    return [*carry, *(_FIXED for _ in stacked)]


def _while(calls: Calls, ins: list[Value]) -> list[Value]:
    params = calls[-1].params
    (condition,), (body,) = jaxprs(params["cond_jaxpr"]), jaxprs(params["body_jaxpr"])
    first, second = params["cond_nconsts"], params["body_nconsts"]
    consts = ins[first : first + second]
    carry = loop(ins[first + second :], lambda now: results_of(body, [*consts, *now], calls))
    (holds,) = results_of(condition, [*ins[:first], *carry], calls)
    if holds.kind == "element":
        refuse(f"the length of a loop depends on {named(holds.where)}{source(calls)}")
    return carry


def _cond(calls: Calls, ins: list[Value], wanted: list[bool]) -> list[Value]:
    if ins[0].kind == "element":
        refuse(f"a conditional depends on {named(ins[0].where)}{source(calls)}")
    first, *others = [results_of(branch, ins[1:], calls, wanted) for branch in branches(calls[-1])]
    for other in others:
        first = [_joined(*pair) for pair in zip(first, other, strict=True)]
    return first


def _applied(calls: Calls, ins: list[Value], wanted: list[bool]) -> list[Value]:
    """What the results of an operation depend on."""
    eqn = calls[-1]
    name = eqn.primitive.name
    if (inner := inlined(eqn)) is not None:
        return results_of(inner, ins, calls, wanted)
    if name == "cond":
        return _cond(calls, ins, wanted)
    if name in ("scan", "while"):
        return (_scan if name == "scan" else _while)(calls, ins)
    if name in IDENTITIES and len(ins) == len(eqn.outvars):
        return ins
    element = next((value for value in ins if value.kind == "element"), None)
    if element is None:
        known = name in ELEMENTWISE | SHAPED and all(value.kind == "same" for value in ins)
        return [_SAME if known or _size(out) == 1 else _FIXED for out in eqn.outvars]
    shapes = {shape_of(x) for x, v in zip(eqn.invars, ins, strict=True) if v.kind == "element"}
    kept = shapes == {shape_of(eqn.outvars[0])} and len(eqn.outvars) == 1
    moves = name in {"transpose", "rev"} and _size(eqn.outvars[0]) > 1
    if not kept or moves or name not in ELEMENTWISE | SHAPED:
        refuse(f"it applies `{name}` to {named(element.where)}{source(calls)}")
    if any(value.kind == "fixed" for value in ins):
        refuse(
            f"it combines {named(element.where)} with an array that may depend on the position of "
            f"a coordinate, such as noise or a constant{source(calls)}"
        )
    return [element]


def results_of(
    jaxpr: Any, inputs: list[Value], calls: Calls = (), wanted: list[bool] | None = None
) -> list[Value]:
    """What the results of a program depend on.

    Args:
      jaxpr: The program.
      inputs: What its inputs depend on.
      calls: The operations that contain it, outermost first.
      wanted: Which results are used. The others, and the operations for them alone, may be
        anything, and are not read.
    """
    used = [True] * len(jaxpr.outvars) if wanted is None else wanted
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    known |= {v: _SAME if _size(v) == 1 else _FIXED for v in jaxpr.constvars}

    def read(atom: Any) -> Value:
        if is_literal(atom):
            return _SAME if _size(atom) == 1 else _FIXED
        return known.get(atom, _SAME)

    for eqn, outs in live(jaxpr, used)[0]:
        results = _applied((*calls, eqn), [*map(read, eqn.invars)], outs)
        known |= dict(zip(eqn.outvars, results, strict=True))
    return [*map(read, jaxpr.outvars)]


def operations(jaxpr: Any, calls: Calls = ()) -> Iterator[Calls]:
    """All operations of a program, each after the calls that contain it."""
    for eqn, _ in live(jaxpr, [True] * len(jaxpr.outvars))[0]:
        yield (*calls, eqn)
        for inner in jaxprs([*eqn.params.values()]):
            yield from operations(inner, (*calls, eqn))
