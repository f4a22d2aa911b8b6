"""Reading a jaxpr as a compiler does: what is dead is not there, what is equal is there once."""

from collections.abc import Iterator
from typing import Any

# Calls whose operands are those of the jaxpr inside, one by one, and whose results are too.
_CALLS = ("jit", "pjit", "shard_map", "closed_call", "core_call", "remat2", "checkpoint")


def jaxprs(value: Any) -> Iterator[Any]:
    """The jaxprs in a parameter of an equation."""
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr") and hasattr(value.jaxpr, "eqns"):
        yield value.jaxpr
    elif isinstance(value, list | tuple):
        for item in value:
            yield from jaxprs(item)


def inlined(eqn: Any) -> Any:
    """The jaxpr of a call whose operands are those of the equation; `None` where it is none."""
    if eqn.primitive.name not in _CALLS and not eqn.primitive.name.startswith("custom_"):
        return None
    inside = [inner for value in eqn.params.values() for inner in jaxprs(value)]
    fits = inside and len(inside[0].invars) == len(eqn.invars)
    return inside[0] if fits and len(inside[0].outvars) == len(eqn.outvars) else None


def branches(eqn: Any) -> list[Any]:
    """The jaxprs of a conditional."""
    return [inner for branch in eqn.params["branches"] for inner in jaxprs(branch)]


def is_literal(atom: Any) -> bool:
    """Whether an operand is a constant written into the equation."""
    return hasattr(atom, "val")


def live(jaxpr: Any, wanted: list[bool]) -> tuple[list[tuple[Any, list[bool]]], list[bool]]:
    """The equations that matter, each with which of its results do, and which inputs do.

    Args:
      jaxpr: The program.
      wanted: Which of its results matter.
    """
    needed = {
        v for v, want in zip(jaxpr.outvars, wanted, strict=True) if want and not is_literal(v)
    }
    kept = []
    for eqn in reversed(jaxpr.eqns):
        outs = [out in needed for out in eqn.outvars]
        if not any(outs) and all(type(e).__name__ == "NamedAxisEffect" for e in eqn.effects):
            continue
        kept.append((eqn, outs))
        ins = [True] * len(eqn.invars)
        if (inner := inlined(eqn)) is not None:
            ins = live(inner, outs)[1]
        elif eqn.primitive.name == "cond":
            each = [live(branch, outs)[1] for branch in branches(eqn)]
            ins = [True, *map(any, zip(*each, strict=True))]
        needed |= {v for v, used in zip(eqn.invars, ins, strict=True) if used and not is_literal(v)}
    return kept[::-1], [v in needed for v in jaxpr.invars]
