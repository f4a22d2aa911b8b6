"""Finds the collectives of a jaxpr, and which of them compilers combine in one message."""

import itertools
import math
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AxisType, NamedSharding

from jaxcomm.wire._collective import Branches, Collective, Node
from jaxcomm.wire._program import (
    bodies,
    branches,
    inlined,
    is_literal,
    live,
    manual_axes,
    named_axes,
    observable,
)
from jaxcomm.wire._source import is_ours, lines_of, scope_of, user_line

COLLECTIVES = {
    "psum": "all_reduce",
    "psum2": "all_reduce",
    "psum_invariant": "all_reduce",
    "unreduced_psum": "all_reduce",
    "pmax": "all_reduce",
    "unreduced_pmax": "all_reduce",
    "pmin": "all_reduce",
    "unreduced_pmin": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "psum_scatter": "reduce_scatter",
    "unreduced_reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "ppermute": "ppermute",
    "psend": "ppermute",
    "pbroadcast": "broadcast",
}
"""Also with `_start` at the end, if another equation awaits the result."""

_SILENT = ("axis_index", "precv")
"""Those that name an axis and send nothing."""


SIMULATED = "simulated_workers"
"""The name of the program of a simulated step, by which an account recognizes it."""


class _Place(NamedTuple):
    """The position of an equation in a program."""

    sizes: dict[str, int]  # of the mesh's axes
    automatic: tuple[str, ...]  # axes over which XLA chooses the sharding
    manual: frozenset[str]
    times: int
    path: tuple[str, ...]
    scope: str = ""


class _Computation:
    """One computation of the compiled program, within which collectives are combined.

    Values have numbers; values that are computed twice have the same number. For each value,
    `waits` has the number of rounds of collectives on which it depends, by kind. Collectives of one
    kind and round are combined.
    """

    def __init__(self, groups: Iterator[int], live: dict[Any, Any], axes: set[str]):
        self.groups, self.live, self.axes = groups, live, axes
        self.numbers: dict[Hashable, int] = {}
        self.waits: dict[int, dict[Hashable, int]] = {}
        self.group_of: dict[Hashable, int] = {}

    def number(self, value: Hashable, waits: dict[Hashable, int]) -> int:
        """Returns the number of a value."""
        number = self.numbers.setdefault(value, len(self.numbers))
        self.waits.setdefault(number, waits)
        return number

    def new(self) -> int:
        """Returns the number of a new, unknown value."""
        return self.number(object(), {})


def _merged(waits: list[dict[Hashable, int]]) -> dict[Hashable, int]:
    merged: dict[Hashable, int] = {}
    for each in waits:
        for kind, rounds in each.items():
            merged[kind] = max(merged.get(kind, 0), rounds)
    return merged


def _axes_of(params: dict[str, Any]) -> tuple[str, ...]:
    axes = params.get("axes", params.get("axis_name", ()))
    axes = axes if isinstance(axes, list | tuple) else (axes,)
    return tuple(axis for axis in axes if isinstance(axis, str))


def _names_an_axis(eqn: Any) -> bool:
    """Whether an equation depends on the other devices of an axis, as collectives do."""
    return any(type(effect).__name__ == "NamedAxisEffect" for effect in eqn.effects)


def _shard_shape(aval: Any) -> tuple[int, ...]:
    """Returns the shape of a device's shard, or of the whole if the type has no sharding."""
    sharding = aval.sharding
    if not isinstance(sharding, NamedSharding):
        return tuple(aval.shape)
    named = named_axes(sharding.spec)
    parts = [math.prod(sharding.mesh.shape[axis] for axis in axes) for axes in named]
    return tuple(
        size // part for size, part in itertools.zip_longest(aval.shape, parts, fillvalue=1)
    )


def _sends(eqn: Any, kind: str) -> bool:
    """Whether a collective sends anything; the identity permutation does not."""
    return kind != "ppermute" or any(sender != receiver for sender, receiver in eqn.params["perm"])


def _collectives(
    eqn: Any, kind: str, group: int, place: _Place, axes: tuple[str, ...]
) -> list[Collective]:
    groups = eqn.params.get("axis_index_groups")
    workers = len(groups[0]) if groups else math.prod(place.sizes[axis] for axis in axes)
    # The other operands of a ragged exchange are sizes and offsets.
    operands = eqn.invars[:1] if eqn.primitive.name.startswith("ragged") else eqn.invars
    lines = lines_of(eqn)
    return [
        Collective(
            kind,
            axes,
            workers,
            operand.aval.dtype,
            _shard_shape(operand.aval),
            place.times,
            place.path,
            group,
            place.automatic if math.prod(operand.aval.shape) > 1 else (),
            tuple((int(i), int(j)) for i, j in eqn.params["perm"]) if kind == "ppermute" else (),
            "" if is_ours(lines) else user_line(lines),
            scope_of(_within(place.scope, eqn)),
        )
        for operand in operands
    ]


def _within(scope: str, eqn: Any) -> str:
    """The named scopes of an equation in those of the calls around it."""
    return f"{scope}/{eqn.source_info.name_stack}"


def _inside(eqn: Any, place: _Place) -> _Place:
    """Returns the place of the equations in a call or loop."""
    name, params = eqn.primitive.name, eqn.params
    place = place._replace(scope=_within(place.scope, eqn))
    if name == "shard_map":
        mesh = params["mesh"]
        manual = place.manual | manual_axes(params)
        automatic = tuple(
            axis
            for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind == AxisType.Auto and axis not in manual and mesh.shape[axis] > 1
        )
        sizes = {**place.sizes, **dict(mesh.shape)}
        return place._replace(sizes=sizes, automatic=automatic, manual=manual)
    if name == "scan":
        path = (*place.path, f"scan x{params['length']}")
        return place._replace(times=place.times * params["length"], path=path)
    if name == "while":
        return place._replace(path=(*place.path, "while"))
    return place


def _walk(
    jaxpr: Any, inputs: list[int], wanted: list[bool], place: _Place, computation: _Computation
) -> tuple[list[Node], list[int]]:
    """Returns the collectives of a jaxpr and the numbers of its results."""
    numbers = dict(zip(jaxpr.invars, inputs, strict=True))
    nodes: list[Node] = []

    def number_of(atom: Any) -> int:
        if is_literal(atom):
            value = np.asarray(atom.val, atom.aval.dtype)
            return computation.number(("literal", value.tobytes(), str(value.dtype)), {})
        if atom not in numbers:
            numbers[atom] = computation.new()
        return numbers[atom]

    for eqn, outs in live(jaxpr, wanted, computation.live)[0]:
        name, params = eqn.primitive.name, eqn.params
        operands = tuple(number_of(atom) for atom in eqn.invars)
        waits = _merged([computation.waits[number] for number in operands])
        try:
            signature: Hashable = (name, tuple(sorted(params.items())), operands)
            hash(signature)
        except TypeError:
            signature = object()
        if observable(eqn):
            signature = object()
        if params.get("name") == SIMULATED:
            raise ValueError(
                "The program contains a step of `jaxcomm.simulate`, which sends nothing: account "
                "for the step itself, `jaxcomm.wire.account(step, params, opt_state, batch)`."
            )
        kind = COLLECTIVES.get(name.removesuffix("_start"))
        axes = _axes_of(params) if kind else ()
        inner = inlined(eqn)
        if kind and axes:
            is_duplicate = (signature, 0) in computation.numbers
            dtypes = tuple(str(atom.aval.dtype) for atom in eqn.invars[:1])
            sizes = tuple(place.sizes[axis] for axis in axes)
            combines = (kind, name, axes, sizes, str(params.get("axis_index_groups")), dtypes)
            waits = {**waits, combines: waits.get(combines, 0) + 1}
            if not is_duplicate and _sends(eqn, kind):
                key = (combines, waits[combines]) if kind == "all_reduce" else signature
                if key not in computation.group_of:
                    computation.group_of[key] = next(computation.groups)
                nodes += _collectives(eqn, kind, computation.group_of[key], place, axes)
        elif inner is not None:
            if name == "shard_map":  # A value with a different sharding is a different value.
                computation.axes.update(params["mesh"].axis_names)
                mesh = str(params["mesh"])
                operands = tuple(
                    computation.number(
                        ("sharded", number, str(spec), mesh), computation.waits[number]
                    )
                    for number, spec in zip(operands, params["in_specs"], strict=True)
                )
            elif params.get("differentiated") and params.get("prevent_cse"):
                # A barrier: what `jax.checkpoint` computes again, XLA computes again.
                operands = tuple(
                    computation.number(object(), computation.waits[number]) for number in operands
                )
            found, results = _walk(inner, [*operands], outs, _inside(eqn, place), computation)
            nodes += found
            if name == "shard_map":
                results = [
                    computation.number(
                        ("concatenated", number, str(spec), mesh), computation.waits[number]
                    )
                    for number, spec in zip(results, params["out_specs"], strict=True)
                ]
            numbers |= dict(zip(eqn.outvars, results, strict=True))
            continue
        elif name == "cond":
            count = len(branches(eqn))
            alternatives = [
                _walk_separately(
                    branch,
                    outs,
                    _inside(eqn, place)._replace(path=(*place.path, f"cond {i}/{count}")),
                    computation,
                )
                for i, branch in enumerate(branches(eqn), 1)
            ]
            if any(alternatives):
                nodes.append(Branches(tuple(map(tuple, alternatives))))
        else:
            inside = bodies(eqn, outs, computation.live)
            if not inside and _names_an_axis(eqn) and name not in _SILENT:
                raise ValueError(f"This collective is of an unknown kind: {eqn}")
            for body, used in inside:
                nodes += _walk_separately(body, used, _inside(eqn, place), computation)
        for position, out in enumerate(eqn.outvars):
            numbers[out] = computation.number((signature, position), waits)
    return nodes, [number_of(atom) for atom in jaxpr.outvars]


def _walk_separately(
    jaxpr: Any, wanted: list[bool], place: _Place, around: _Computation
) -> list[Node]:
    """Returns the collectives of a loop's body or a branch, which is a separate computation."""
    computation = _Computation(around.groups, around.live, around.axes)
    inputs = [computation.new() for _ in jaxpr.invars]
    return _walk(jaxpr, inputs, wanted, place, computation)[0]


def collectives_of(jaxpr: Any) -> tuple[tuple[Node, ...], set[str]]:
    """Returns the collectives of a program, and the axes of its meshes."""
    around = _Computation(itertools.count(), {}, set())
    place = _Place({}, (), frozenset(), 1, ())
    nodes = _walk_separately(jaxpr, [True] * len(jaxpr.outvars), place, around)
    return tuple(nodes), around.axes
