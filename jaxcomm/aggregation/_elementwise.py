"""Checks while tracing that an optimizer is element-wise: a slice of each leaf suffices for it.

The optimizer is traced twice, for whole leaves and for slices, and nothing is computed. In the
program for whole leaves, no coordinate may depend on another one, nor on its position. The program
for slices must be the same one, so that nothing depends on a shape.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PerWorker, PyTree
from jaxcomm.aggregation._dependence import (
    ELEMENTWISE,
    IDENTITIES,
    SHAPED,
    Value,
    loop,
    named,
    operations,
    refuse,
    results_of,
    shape_of,
    source,
)
from jaxcomm.wire._program import is_literal, jaxprs, live

_COLLECTIVES = {
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "psend", "precv"),
    *("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "axis_index"),
    *("reduce_scatter", "unreduced_psum", "unreduced_reduce_scatter", "pbroadcast", "pgather"),
}


def _require_silent(jaxpr: Any) -> None:
    """Raises if a program communicates, or depends on the worker."""
    found = [calls for calls in operations(jaxpr) if calls[-1].primitive.name in _COLLECTIVES]
    # A transformation that asks for its worker usually communicates later.
    for calls in sorted(found, key=lambda calls: calls[-1].primitive.name == "axis_index"):
        params = calls[-1].params
        axes = params.get("axes", params.get("axis_name", ()))
        raise ValueError(
            f"`tx` of `sharded_server` must not communicate, but it applies "
            f"`{calls[-1].primitive.name}` over the axis {axes!r}{source(calls)}. The aggregator "
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
        refuse("its operations depend on the shapes of the leaves")
    for one, other in zip(ones, others, strict=True):
        name = one.primitive.name
        pairs = [*zip(one.invars, other.invars, strict=True)]
        for x, y in pairs:
            if is_literal(x) != is_literal(y) or (is_literal(x) and not _equal(x.val, y.val)):
                refuse(f"a constant depends on the shapes of the leaves{source([one])}")
        inside = [[*jaxprs([*eqn.params.values()])] for eqn in (one, other)]
        mixes = not inside[0] and name not in ELEMENTWISE | SHAPED | IDENTITIES
        if mixes and any(shape_of(x) != shape_of(y) for x, y in pairs):
            refuse(f"it applies `{name}` to arrays of the shapes of the leaves{source([one])}")
        for option, value in one.params.items():
            simple = isinstance(value, int | float | str | np.dtype)
            if simple and value != other.params.get(option):
                refuse(f"`{option}` of `{name}` depends on the shapes of the leaves{source([one])}")
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
        return _axis.local_params(tree, axis_name=axis_name)

    def init(params: PyTree) -> PyTree:
        return tx.init(vary(params))

    def update(updates: PyTree, state: PyTree, params: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(state)
        typed = [vary(x) if differs else x for x, differs in zip(leaves, own, strict=True)]
        args = vary(updates), jax.tree.unflatten(treedef, typed), vary(params)
        return tx.update(*args, **(extra_args or {}))

    like = updates if params is None else params
    begin, state = jax.make_jaxpr(init, return_shape=True)(like)
    if (found := len(jax.tree.leaves(state))) != len(own):
        raise ValueError(
            f"This state of the optimizer has {len(own)} leaves, and one for these parameters has "
            f"{found}: it was made for other parameters or another optimizer."
        )
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
        [Value("element", jax.tree_util.keystr(path)) for path, _ in leaves]
        for leaves in map(jax.tree_util.tree_leaves_with_path, (updates, params))
    ]
    values = results_of(whole.init.jaxpr, elements[0] if params is None else elements[1])
    if whole.update is not None:
        results = list[Value]()

        def step(values: list[Value]) -> list[Value]:
            results[:] = results_of(whole.update.jaxpr, [*elements[0], *values, *elements[1]])
            return results[len(results) - len(values) :]

        values = loop(values, step)
        if any(value.kind == "fixed" for value in results[: len(results) - len(values)]):
            refuse("its update depends on the positions of coordinates")
    for value, differs in zip(values, own, strict=True):
        if value.kind == "element" and not differs:
            refuse(f"a scalar of its state depends on {named(value.where)}")
    some_updates, some_params = map(_abstract, jax.eval_shape(slices, (updates, params)))
    try:
        sliced, _ = _trace(tx, axis_name, some_updates, some_params, own, extra_args)
    except Exception as error:
        _refuse_from(error)
    for one, other in zip(whole, sliced, strict=True):
        if one is not None and other is not None:
            if not all(map(_equal, one.consts, other.consts)):
                refuse("a constant depends on the shapes of the leaves")
            _require_same(one.jaxpr, other.jaxpr)


def _refuse_from(error: Exception) -> NoReturn:
    try:
        refuse(f"it fails for arrays of the shapes of slices: {str(error).splitlines()[0]}")
    except ValueError as refusal:
        raise refusal from error
