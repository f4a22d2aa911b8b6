"""Over which axes the results of a traced program differ: inferred, where JAX's types are rules.

The types of `jax.shard_map(check_vma=True)` say it too. But a loop must begin with the type with
which it ends, so a loop that begins with a constant is an error, as is a kernel without a type. A
loss need not follow these rules. Here a value that may differ counts as different.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax

from jaxcomm._contract import PyTree
from jaxcomm._gradients import LOCAL
from jaxcomm._mesh import axes_in
from jaxcomm.wire._program import branches, inlined, is_literal, jaxprs
from jaxcomm.wire._walk import COLLECTIVES

EQUAL, REDUCED, DIFFERENT = range(3)
Value: TypeAlias = tuple[int, ...]
"""For each axis: whether a value is equal by construction, by a reduction over the axis, or not."""

_REDUCTIONS = {name for name, kind in COLLECTIVES.items() if kind in ("all_reduce", "all_gather")}


def _names_of(eqn: Any) -> tuple[str, ...]:
    """The axes of a collective, or of `axis_index`; empty for other equations."""
    if eqn.primitive.name not in {*COLLECTIVES, "axis_index"}:
        return ()
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return (names,) if isinstance(names, str) else tuple(names)


def _named_in(jaxprs_: Iterable[Any], without: str = "") -> set[str]:
    """The axes that programs name, except in the operation `without`."""
    found: set[str] = set()
    for jaxpr in jaxprs_:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name != without:
                found |= {*_names_of(eqn)}
            found |= _named_in(jaxprs([*eqn.params.values()]), without)
    return found


class Inference:
    """Infers how the results of programs differ over `axes`."""

    def __init__(self, axes: tuple[str, ...]):
        self.axes = axes
        self.equal: Value = (EQUAL,) * len(axes)

    def over(self, names: Sequence[str]) -> Value:
        """A value that differs over the axes in `names`."""
        return tuple(DIFFERENT if name in names else EQUAL for name in self.axes)

    def joined(self, *values: Value) -> Value:
        """A value that depends on all of `values`."""
        return tuple(map(max, zip(self.equal, *values, strict=True)))

    def results_of(self, jaxpr: Any, inputs: Sequence[Value]) -> list[Value]:
        """How the results of a program differ.

        Args:
          jaxpr: The program.
          inputs: How its inputs differ.

        Raises:
          ValueError: If a condition differs over the axis of a collective which depends on it, so
            that some workers would wait for the others forever.
        """
        known = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Value:
            return self.equal if is_literal(atom) else known.get(atom, self.equal)

        for eqn in jaxpr.eqns:
            known |= zip(eqn.outvars, self._applied(eqn, [*map(read, eqn.invars)]), strict=True)
        return [*map(read, jaxpr.outvars)]

    def _applied(self, eqn: Any, ins: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if (inner := inlined(eqn)) is not None:
            return self.results_of(inner, ins)
        if name == "cond":
            return self._cond(eqn, ins)
        if name == "while":
            return self._while(eqn, ins)
        if name == "scan":
            return self._scan(eqn, ins)
        if name == "optimization_barrier":
            return ins
        if name == "name" and eqn.params["name"] == LOCAL:
            return [self.over(self.axes)]
        if any(hasattr(x.aval, "inner_aval") for x in (*eqn.invars, *eqn.outvars)):
            return [self.over(self.axes)] * len(eqn.outvars)  # A reference: what it holds changes.
        names = _names_of(eqn)
        if name in _REDUCTIONS and eqn.params.get("axis_index_groups") is None:
            return [self._reduced(value, names) for value in ins]
        inside = _named_in(jaxprs([*eqn.params.values()]))  # Of an operation unknown here.
        return [self.joined(*ins, self.over((*names, *inside)))] * len(eqn.outvars)

    def _reduced(self, value: Value, names: tuple[str, ...]) -> Value:
        each = zip(self.axes, value, strict=True)
        return tuple(min(how, REDUCED) if name in names else how for name, how in each)

    def _loop(self, carry: list[Value], body: Callable[[list[Value]], list[Value]]) -> list[Value]:
        """How the carry of a loop differs after any number of turns."""
        while True:
            after = [self.joined(*pair) for pair in zip(carry, body(carry), strict=True)]
            if after == carry:
                return after
            carry = after

    def _require_equal(self, condition: Value, programs: list[Any]) -> None:
        waiting = _named_in(programs, without="axis_index")
        each = zip(self.axes, condition, strict=True)
        if differs := [name for name, how in each if how == DIFFERENT and name in waiting]:
            raise ValueError(
                "All workers must run the same branch, and a loop as often, where there is a "
                f"collective inside, but the condition differs over {differs}: let it be equal, as "
                f"`jax.lax.pmax(condition, {differs[0]!r})` is."
            )

    def _cond(self, eqn: Any, ins: list[Value]) -> list[Value]:
        index, *operands = ins
        programs = branches(eqn)
        self._require_equal(index, programs)
        results = [self.results_of(program, operands) for program in programs]
        return [self.joined(index, *each) for each in zip(*results, strict=True)]

    def _while(self, eqn: Any, ins: list[Value]) -> list[Value]:
        (condition,), (body,) = jaxprs(eqn.params["cond_jaxpr"]), jaxprs(eqn.params["body_jaxpr"])
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        consts = ins[first : first + second]

        def holds(carry: list[Value]) -> Value:
            return self.results_of(condition, [*ins[:first], *carry])[0]

        def turn(carry: list[Value]) -> list[Value]:
            again = holds(carry)
            return [self.joined(again, x) for x in self.results_of(body, [*consts, *carry])]

        carry = self._loop(ins[first + second :], turn)
        self._require_equal(holds(carry), [condition, body])
        return carry

    def _scan(self, eqn: Any, ins: list[Value]) -> list[Value]:
        (body,) = jaxprs(eqn.params["jaxpr"])
        # Scanned operands have one more axis outside; the others are constants, then carries.
        whole = sum(
            x.aval.ndim == y.aval.ndim for x, y in zip(eqn.invars, body.invars, strict=True)
        )
        carries = sum(
            x.aval.ndim == y.aval.ndim for x, y in zip(eqn.outvars, body.outvars, strict=True)
        )
        consts, scanned = ins[: whole - carries], ins[whole:]

        def turn(carry: list[Value]) -> list[Value]:
            return self.results_of(body, [*consts, *carry, *scanned])

        carry = self._loop(ins[whole - carries : whole], lambda now: turn(now)[:carries])
        return [*carry, *turn(carry)[carries:]]


@dataclasses.dataclass(frozen=True)
class Varies:
    """The axes over which a result differs, and those over which it has been reduced instead."""

    over: tuple[str, ...]
    reduced: tuple[str, ...]


def infer(
    jaxpr: Any, shapes: PyTree, axes: tuple[str, ...], in_specs: PyTree, args: PyTree
) -> PyTree:
    """How each result of the program of one device varies, a tree of `Varies`.

    Args:
      jaxpr: The program.
      shapes: The tree of its results.
      axes: The axes over which devices may differ.
      in_specs: How arguments are sharded over them, a prefix of `args`.
      args: The arguments of all devices.
    """
    inference = Inference(axes)
    specs = jax.tree.leaves(jax.tree.broadcast(in_specs, args))
    results = inference.results_of(jaxpr, [inference.over(axes_in(spec)) for spec in specs])

    def those(value: Value, how: int) -> tuple[str, ...]:
        return tuple(name for name, is_ in zip(axes, value, strict=True) if is_ == how)

    found = [Varies(those(value, DIFFERENT), those(value, REDUCED)) for value in results]
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def require_not_reduced(gradient: PyTree, names: tuple[str, ...]) -> None:
    """Raises if gradients have been summed or averaged over workers already."""
    for path, varies in jax.tree_util.tree_leaves_with_path(gradient):
        if summed := [name for name in names if name in varies.reduced]:
            raise ValueError(
                f"The gradient at {jax.tree_util.keystr(path) or 'the root'} does not vary over "
                f"{summed}: it has been summed already. Let `gradients` return that of this "
                "worker's own rows, such as that of `jaxcomm.local_value_and_grad`."
            )
