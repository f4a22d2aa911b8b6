"""Whether XLA partitions a traced program, and so may insert collectives."""

import itertools
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding

from jaxcomm.wire._program import inlined, is_literal, manual_axes, named_axes

_UNKNOWN = object()
"""The layout of an array that is sharded in a way that the program does not say."""


def _layout_of(sharding: Any) -> Any:
    """The axes of each dimension, up to the last that is sharded; None if none is."""
    if isinstance(sharding, NamedSharding):
        return _named(sharding.spec, sharding.mesh.shape)
    replicated = getattr(sharding, "is_fully_replicated", True)
    return None if replicated else _UNKNOWN


def _named(spec: Any, sizes: Any, over: Any = None) -> Any:
    if any(sizes[axis] > 1 for axis in getattr(spec, "unreduced", ())):
        return _UNKNOWN  # A part of a sum.
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
