"""Reads a jaxpr as a compiler does, without dead code."""

from collections.abc import Iterator, Sequence
from typing import Any

# Calls whose operands and results are, in order, those of the jaxpr inside.
_CALLS = (
    "jit",
    "pjit",
    "shard_map",
    "closed_call",
    "core_call",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "custom_vmap_call",
)


_PLAIN = frozenset((int, str, bool, float, type(None)))  # Most parameters; no time for them.


def jaxprs(value: Any) -> Iterator[Any]:
    """Yields the jaxprs in a parameter of an equation."""
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr") and hasattr(value.jaxpr, "eqns"):
        yield value.jaxpr
    elif isinstance(value, list | tuple):
        for item in value:
            if type(item) not in _PLAIN:
                yield from jaxprs(item)


def inlined(eqn: Any) -> Any:
    """Returns the jaxpr of a call with the operands of the equation; None for other equations."""
    if eqn.primitive.name not in _CALLS:
        return None
    inside = [inner for value in eqn.params.values() for inner in jaxprs(value)]
    fits = inside and len(inside[0].invars) == len(eqn.invars)
    return inside[0] if fits and len(inside[0].outvars) == len(eqn.outvars) else None


def branches(eqn: Any) -> list[Any]:
    """Returns the jaxprs of a conditional."""
    return [inner for branch in eqn.params["branches"] for inner in jaxprs(branch)]


def bodies(eqn: Any, outs: list[bool], known: dict[Any, Any]) -> list[tuple[Any, list[bool]]]:
    """Returns the jaxprs of a loop or another equation, each with which of its results are used."""
    if eqn.primitive.name == "scan":
        (body,) = jaxprs(eqn.params["jaxpr"])
        return [(body, _scanned(eqn, body, outs, known)[0])]
    if eqn.primitive.name == "custom_linear_solve":  # The other jaxprs are for its derivatives.
        inside = [*jaxprs(eqn.params["jaxprs"].solve)]
    else:
        inside = [*jaxprs(tuple(eqn.params.values()))]
    return [(inner, [True] * len(inner.outvars)) for inner in inside]


def _scanned(
    eqn: Any, body: Any, outs: list[bool], known: dict[Any, Any]
) -> tuple[list[bool], list[bool]]:
    """Returns which results and operands of a scan's body are used; a carry may use another."""
    # Scanned operands have one more axis outside; the others are constants, then carries.
    whole = [x.aval.ndim == y.aval.ndim for x, y in zip(eqn.invars, body.invars, strict=True)]
    carries = sum(
        x.aval.ndim == y.aval.ndim for x, y in zip(eqn.outvars, body.outvars, strict=True)
    )
    consts = sum(whole) - carries
    wanted = list(outs)
    while True:
        used = live(body, wanted, known)[1]
        carried = [
            want or use
            for want, use in zip(wanted[:carries], used[consts : consts + carries], strict=True)
        ]
        if carried == wanted[:carries]:
            return wanted, used
        wanted[:carries] = carried


def observable(eqn: Any) -> bool:
    """Whether an equation has side effects; the named axes of collectives are not side effects."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def named_axes(spec: Any) -> list[tuple[str, ...]]:
    """The axes of each dimension of a `PartitionSpec`."""
    parts = getattr(spec, "partitions", spec)
    return [(part,) if isinstance(part, str) else tuple(part or ()) for part in parts]


def manual_axes(params: Any) -> Any:
    """The axes over which a `shard_map` maps; the parameter is `manual_axes` in JAX 0.10."""
    return next(axes for key, axes in params.items() if key.endswith("manual_axes"))


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of a table of left-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def is_literal(atom: Any) -> bool:
    """Whether an operand is a literal."""
    return hasattr(atom, "val")


def live(
    jaxpr: Any, wanted: list[bool], known: dict[Any, Any] | None = None
) -> tuple[list[tuple[Any, list[bool]]], list[bool]]:
    """Returns the equations that are used, each with which of its results are, and the used inputs.

    Args:
      jaxpr: The program.
      wanted: Which of its results are used.
      known: The results for this program so far, to look up and extend.
    """
    known, key = {} if known is None else known, (id(jaxpr), *wanted)
    if key not in known:
        known[key] = _live(jaxpr, wanted, known)
    found: tuple[list[tuple[Any, list[bool]]], list[bool]] = known[key]
    return found


def _live(
    jaxpr: Any, wanted: list[bool], known: dict[Any, Any]
) -> tuple[list[tuple[Any, list[bool]]], list[bool]]:
    needed = {
        v for v, want in zip(jaxpr.outvars, wanted, strict=True) if want and not is_literal(v)
    }
    kept = []
    for eqn in reversed(jaxpr.eqns):
        outs = [out in needed for out in eqn.outvars]
        if not any(outs) and not observable(eqn):
            continue
        kept.append((eqn, outs))
        ins = [True] * len(eqn.invars)
        if (inner := inlined(eqn)) is not None:
            ins = live(inner, outs, known)[1]
        elif eqn.primitive.name == "scan" and not observable(eqn):
            (body,) = jaxprs(eqn.params["jaxpr"])
            ins = _scanned(eqn, body, outs, known)[1]
        elif eqn.primitive.name == "cond":
            each = [live(branch, outs, known)[1] for branch in branches(eqn)]
            ins = [True, *map(any, zip(*each, strict=True))]
        needed |= {v for v, used in zip(eqn.invars, ins, strict=True) if used and not is_literal(v)}
    return kept[::-1], [v in needed for v in jaxpr.invars]
