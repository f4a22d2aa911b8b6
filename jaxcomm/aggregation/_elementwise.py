"""Checks while tracing that an optimizer is element-wise: a slice of each leaf suffices for it.

The optimizer is traced twice, for whole leaves and for slices, and nothing is computed. In the
program for whole leaves, no coordinate may depend on another one, nor on its position. The program
for slices must be the same one, so that nothing depends on a shape.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm import _axis
from jaxcomm._base import AxisName, PerWorker, PyTree
from jaxcomm.wire._program import branches, inlined, is_literal, jaxprs, live

_COLLECTIVES = {
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "psend", "precv"),
    *("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "axis_index"),
    *("reduce_scatter", "unreduced_psum", "unreduced_reduce_scatter", "pbroadcast", "pgather"),
}
_ELEMENTWISE = {
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
_IDENTITIES = {
    *("optimization_barrier", "pcast", "pvary", "device_put", "reshard", "sharding_constraint"),
}
# The identity if the shape does not change; of equal coordinates, they make equal coordinates.
_SHAPED = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev", "slice"}


class _Value(NamedTuple):
    """What the coordinates of an array depend on.

    `"same"`: they are equal, and equal on all workers. `"fixed"`: they depend on no gradient,
    parameter or state, but may depend on their position. `"element"`: each depends on the same
    coordinate of gradients, parameters and state only.
    """

    kind: Literal["same", "fixed", "element"]
    where: str = ""  # The leaf on which an element depends.


_Calls: TypeAlias = tuple[Any, ...]  # An operation, after those that contain it.
_SAME, _FIXED = _Value("same"), _Value("fixed")


def _refuse(why: str) -> NoReturn:
    raise ValueError(
        "`tx` of `sharded_server` must be element-wise, since a worker has only its slice of each "
        f"gradient, parameter and state, but {why}. Keep such an optimizer whole on each worker: "
        "`optax.chain(jaxcomm.two_stage_mean(axis_name, codec), tx)`. A clip by norm may come "
        "before `sharded_server` in `optax.chain`: it then clips each worker's gradient."
    )


def _named(where: str) -> str:
    return f"the leaf at {where}" if where else "a leaf"


def _source(calls: Sequence[Any]) -> str:
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


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(np.shape(atom.val) if is_literal(atom) else atom.aval.shape)


def _joined(one: _Value, other: _Value) -> _Value:
    """What a value depends on that may be either."""
    if one.kind == other.kind or other.kind == "same":
        return one
    if one.kind == "same":
        return other
    _refuse(
        f"{_named(one.where or other.where)} is replaced by an array that depends on the position "
        "of a coordinate"
    )


def _loop(values: list[_Value], body: Callable[[list[_Value]], list[_Value]]) -> list[_Value]:
    """What the carry of a loop depends on after any number of turns."""
    while True:
        after = [_joined(*pair) for pair in zip(values, body(values), strict=True)]
        if [value.kind for value in after] == [value.kind for value in values]:
            return after
        values = after


def _scan(calls: _Calls, ins: list[_Value]) -> list[_Value]:
    eqn = calls[-1]
    (body,) = jaxprs(eqn.params["jaxpr"])
    # Scanned operands have one more axis outside; the others are constants, then carries.
    whole = [len(_shape(x)) == y.aval.ndim for x, y in zip(eqn.invars, body.invars, strict=True)]
    carries = sum(
        x.aval.ndim == len(_shape(y)) for x, y in zip(eqn.outvars, body.outvars, strict=True)
    )
    consts = sum(whole) - carries
    for value in ins[consts + carries :]:
        if value.kind == "element":
            _refuse(f"it scans over the first axis of {_named(value.where)}{_source(calls)}")

    def turn(carry: list[_Value]) -> list[_Value]:
        return _results(body, [*ins[:consts], *carry, *ins[consts + carries :]], calls)

    carry = _loop(ins[consts : consts + carries], lambda now: turn(now)[:carries])
    stacked = turn(carry)[carries:]
    for value in stacked:
        if value.kind == "element":
            _refuse(f"it stacks values of {_named(value.where)}{_source(calls)}")
    return [*carry, *(_FIXED for _ in stacked)]


def _while(calls: _Calls, ins: list[_Value]) -> list[_Value]:
    params = calls[-1].params
    (condition,), (body,) = jaxprs(params["cond_jaxpr"]), jaxprs(params["body_jaxpr"])
    first, second = params["cond_nconsts"], params["body_nconsts"]
    consts = ins[first : first + second]
    carry = _loop(ins[first + second :], lambda now: _results(body, [*consts, *now], calls))
    (holds,) = _results(condition, [*ins[:first], *carry], calls)
    if holds.kind == "element":
        _refuse(f"the length of a loop depends on {_named(holds.where)}{_source(calls)}")
    return carry


def _cond(calls: _Calls, ins: list[_Value], wanted: list[bool]) -> list[_Value]:
    if ins[0].kind == "element":
        _refuse(f"a conditional depends on {_named(ins[0].where)}{_source(calls)}")
    first, *others = [_results(branch, ins[1:], calls, wanted) for branch in branches(calls[-1])]
    for other in others:
        first = [_joined(*pair) for pair in zip(first, other, strict=True)]
    return first


def _applied(calls: _Calls, ins: list[_Value], wanted: list[bool]) -> list[_Value]:
    """What the results of an operation depend on."""
    eqn = calls[-1]
    name = eqn.primitive.name
    if (inner := inlined(eqn)) is not None:
        return _results(inner, ins, calls, wanted)
    if name == "cond":
        return _cond(calls, ins, wanted)
    if name in ("scan", "while"):
        return (_scan if name == "scan" else _while)(calls, ins)
    if name in _IDENTITIES and len(ins) == len(eqn.outvars):
        return ins
    element = next((value for value in ins if value.kind == "element"), None)
    if element is None:
        known = name in _ELEMENTWISE | _SHAPED and all(value.kind == "same" for value in ins)
        return [_SAME if known or _size(out) == 1 else _FIXED for out in eqn.outvars]
    shapes = {_shape(x) for x, v in zip(eqn.invars, ins, strict=True) if v.kind == "element"}
    kept = shapes == {_shape(eqn.outvars[0])} and len(eqn.outvars) == 1
    moves = name in {"transpose", "rev"} and _size(eqn.outvars[0]) > 1
    if not kept or moves or name not in _ELEMENTWISE | _SHAPED:
        _refuse(f"it applies `{name}` to {_named(element.where)}{_source(calls)}")
    if any(value.kind == "fixed" for value in ins):
        _refuse(
            f"it combines {_named(element.where)} with an array that may depend on the position of "
            f"a coordinate, such as noise or a constant{_source(calls)}"
        )
    return [element]


def _results(
    jaxpr: Any, inputs: list[_Value], calls: _Calls = (), wanted: list[bool] | None = None
) -> list[_Value]:
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

    def read(atom: Any) -> _Value:
        if is_literal(atom):
            return _SAME if _size(atom) == 1 else _FIXED
        return known.get(atom, _SAME)

    for eqn, outs in live(jaxpr, used)[0]:
        results = _applied((*calls, eqn), [*map(read, eqn.invars)], outs)
        known |= dict(zip(eqn.outvars, results, strict=True))
    return [*map(read, jaxpr.outvars)]


def _operations(jaxpr: Any, calls: _Calls = ()) -> Iterator[_Calls]:
    """All operations of a program, each after the calls that contain it."""
    for eqn, _ in live(jaxpr, [True] * len(jaxpr.outvars))[0]:
        yield (*calls, eqn)
        for inner in jaxprs([*eqn.params.values()]):
            yield from _operations(inner, (*calls, eqn))


def _require_silent(jaxpr: Any) -> None:
    """Raises if a program communicates, or depends on the worker."""
    found = [calls for calls in _operations(jaxpr) if calls[-1].primitive.name in _COLLECTIVES]
    # A transformation that asks for its worker usually communicates later.
    for calls in sorted(found, key=lambda calls: calls[-1].primitive.name == "axis_index"):
        params = calls[-1].params
        axes = params.get("axes", params.get("axis_name", ()))
        raise ValueError(
            f"`tx` of `sharded_server` must not communicate, but it applies "
            f"`{calls[-1].primitive.name}` over the axis {axes!r}{_source(calls)}. The aggregator "
            "is `sharded_server`: pass the optimizer only, without `jaxcomm.mean` or another "
            "aggregator, and place wrappers such as `jaxcomm.skip_nonfinite` around it."
        )


def _equal(one: Any, other: Any) -> bool:
    """Whether two constants are equal; those that are traced, or of several shapes, may be."""
    if any(isinstance(x, jax.core.Tracer) for x in (one, other)) or np.shape(one) != np.shape(
        other
    ):
        return True
    if jnp.issubdtype(jnp.result_type(one), jax.dtypes.extended):
        return True
    return np.asarray(one).tobytes() == np.asarray(other).tobytes()


def _require_same(whole: Any, sliced: Any) -> None:
    """Raises unless two programs differ in shapes only, and only element-wise operations see it."""
    ones = [eqn for eqn, _ in live(whole, [True] * len(whole.outvars))[0]]
    others = [eqn for eqn, _ in live(sliced, [True] * len(sliced.outvars))[0]]
    names = [[eqn.primitive.name for eqn in eqns] for eqns in (ones, others)]
    if names[0] != names[1]:
        _refuse("its operations depend on the shapes of the leaves")
    for one, other in zip(ones, others, strict=True):
        name = one.primitive.name
        pairs = [*zip(one.invars, other.invars, strict=True)]
        for x, y in pairs:
            if is_literal(x) != is_literal(y) or (is_literal(x) and not _equal(x.val, y.val)):
                _refuse(f"a constant depends on the shapes of the leaves{_source([one])}")
        inside = [[*jaxprs([*eqn.params.values()])] for eqn in (one, other)]
        mixes = not inside[0] and name not in _ELEMENTWISE | _SHAPED | _IDENTITIES
        if mixes and any(_shape(x) != _shape(y) for x, y in pairs):
            _refuse(f"it applies `{name}` to arrays of the shapes of the leaves{_source([one])}")
        for option, value in one.params.items():
            simple = isinstance(value, int | float | str | np.dtype)
            if simple and value != other.params.get(option):
                _refuse(
                    f"`{option}` of `{name}` depends on the shapes of the leaves{_source([one])}"
                )
        for nested in zip(*inside, strict=True):
            _require_same(*nested)


class _Programs(NamedTuple):
    """The traced `init` and `update` of an optimizer; no `update` if it cannot be traced."""

    init: Any
    update: Any


def _abstract(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def follows_leaves(tx: optax.GradientTransformation, params: PyTree) -> list[bool]:
    """Which leaves of the state have a shape that depends on those of parameters.

    Others, such as step counts, are equal on all workers. If the structure of the state depends on
    shapes too, all leaves count as dependent.
    """

    def other(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(1 + d for d in x.shape) or (2,), x.dtype)

    state = jax.eval_shape(tx.init, _abstract(params))
    everything = [True] * len(jax.tree.leaves(state))
    try:
        changed = jax.eval_shape(tx.init, jax.tree.map(other, params))
    except Exception:
        return everything
    structures: list[Any] = [jax.tree.structure(tree) for tree in (changed, state)]
    if structures[0] != structures[1]:
        return everything
    pairs = zip(*map(jax.tree.leaves, (state, changed)), strict=True)
    return [one.shape != another.shape for one, another in pairs]


def _trace(
    tx: optax.GradientTransformationExtraArgs,
    axis_name: AxisName,
    updates: PyTree,
    params: PyTree,
    own: list[bool],
    extra_args: dict[str, Any] | None,
) -> tuple[_Programs, PyTree]:
    """The programs for these shapes, and the state; nothing is computed."""

    def vary(tree: PyTree) -> PyTree:
        return _axis.local_params(tree, axis_name)

    def init(params: PyTree) -> PyTree:
        return tx.init(vary(params))

    def update(updates: PyTree, state: PyTree, params: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(state)
        typed = [vary(x) if differs else x for x, differs in zip(leaves, own, strict=True)]
        args = vary(updates), jax.tree.unflatten(treedef, typed), vary(params)
        return tx.update(*args, **(extra_args or {}))

    like = updates if params is None else params
    begin, state = jax.make_jaxpr(init, return_shape=True)(like)
    try:
        then = jax.make_jaxpr(update)(updates, _abstract(state), params)
    except Exception:
        if extra_args is not None:
            raise
        then = None  # It may need arguments that only `update` receives.
    return _Programs(begin, then), state


def _require_optimizer(programs: _Programs, state: PyTree) -> None:
    """Raises unless the transformation is an optimizer only."""
    for program in filter(None, programs):
        _require_silent(program.jaxpr)
    kinds = (optax.MultiStepsState, PerWorker)
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
    if any(isinstance(node, kinds) for node in nodes):
        raise ValueError(
            "`tx` of `sharded_server` must be the optimizer only. Place `jaxcomm.accumulate` "
            "around `sharded_server`, also in place of `optax.MultiSteps`, and omit "
            "`jaxcomm.per_worker`."
        )


def require_elementwise(
    tx: optax.GradientTransformationExtraArgs,
    axis_name: AxisName,
    updates: PyTree,
    params: PyTree,
    own: list[bool],
    slices: Callable[[PyTree], PyTree],
    extra_args: dict[str, Any] | None = None,
) -> None:
    """Raises unless the slices of updates, parameters and state suffice to compute a slice.

    Args:
      tx: The optimizer.
      axis_name: The axes of the workers.
      updates: The whole gradients; only shapes and dtypes matter.
      params: The whole parameters, or `None`.
      own: Which leaves of the state differ by worker.
      slices: The function from a tree to the tree of one worker's slices.
      extra_args: The extra arguments of `update`; `None` in `init`, in which `update` is not
        checked if it needs any.

    Raises:
      ValueError: If `tx` is not element-wise or communicates. The error names the operation.
    """
    updates, params = _abstract(updates), _abstract(params)
    whole, state = _trace(tx, axis_name, updates, params, own, extra_args)
    _require_optimizer(whole, state)
    elements = [
        [_Value("element", jax.tree_util.keystr(path)) for path, _ in leaves]
        for leaves in map(jax.tree_util.tree_leaves_with_path, (updates, params))
    ]
    values = _results(whole.init.jaxpr, elements[0] if params is None else elements[1])
    if whole.update is not None:
        results = list[_Value]()

        def step(values: list[_Value]) -> list[_Value]:
            results[:] = _results(whole.update.jaxpr, [*elements[0], *values, *elements[1]])
            return results[len(results) - len(values) :]

        values = _loop(values, step)
        if any(value.kind == "fixed" for value in results[: len(results) - len(values)]):
            _refuse("its update depends on the positions of coordinates")
    for value, differs in zip(values, own, strict=True):
        if value.kind == "element" and not differs:
            _refuse(f"a scalar of its state depends on {_named(value.where)}")
    some_updates, some_params = map(_abstract, jax.eval_shape(slices, (updates, params)))
    try:
        sliced, _ = _trace(tx, axis_name, some_updates, some_params, own, extra_args)
    except Exception as error:
        _refuse_from(error)
    for one, other in zip(whole, sliced, strict=True):
        if one is not None and other is not None:
            if not all(map(_equal, one.consts, other.consts)):
                _refuse("a constant depends on the shapes of the leaves")
            _require_same(one.jaxpr, other.jaxpr)


def _refuse_from(error: Exception) -> NoReturn:
    try:
        _refuse(f"it fails for arrays of the shapes of slices: {str(error).splitlines()[0]}")
    except ValueError as refusal:
        raise refusal from error
