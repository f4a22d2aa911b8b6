"""Which worker, and which leaf, is the cause of a loss that is not finite."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PyTree
from jaxcomm._gradients import LossFn, local_value_and_grad, parts_of_value
from jaxcomm._require import own_weight
from jaxcomm.training._make_step import make_step
from jaxcomm.training._simulate import simulate
from jaxcomm.training._worker_step import GradientFn

FINITE, INFINITE, NAN = range(3)
NAMES = {NAN: "NaN", INFINITE: "infinity"}
SHOWN = 3  # Workers, and leaves of each.


class Checked(NamedTuple):
    """What of a worker is checked, in this order: a later part follows from an earlier one."""

    parameters: PyTree
    loss: PyTree
    gradient: PyTree


def _worst(x: jax.Array) -> jax.Array:
    """Whether an array has a NaN, else an infinity, int32[]."""
    infinite = jnp.where(jnp.any(jnp.isinf(x)), INFINITE, FINITE)
    return jnp.where(jnp.any(jnp.isnan(x)), NAN, infinite).astype(jnp.int32)


def _gradients(
    gradients: GradientFn | None, has_aux: bool, has_model_state: bool, axes: tuple[str, ...]
) -> GradientFn:
    """The gradients of a worker beside its loss, which transformations do not receive."""

    def evaluate(
        loss_fn: LossFn, params: PyTree, batch: PyTree, *key: jax.Array, **model_state: PyTree
    ) -> tuple[Any, ...]:
        if gradients is None:
            differentiate = local_value_and_grad(
                loss_fn, has_aux or has_model_state, axis_name=axes
            )
            value, gradient = differentiate(params, *model_state.values(), batch, *key)
            weight = []
        else:
            value, gradient, *weight = gradients(loss_fn, params, batch, *key, **model_state)
        loss = parts_of_value(value, has_model_state, has_aux)[0]
        return value, Checked((), loss, gradient), *weight

    return evaluate


def _recorder(
    axis_name: AxisName, paths: list[tuple[str, str]]
) -> optax.GradientTransformationExtraArgs:
    """A transformation that changes no parameters, and whose state is int32[workers, leaves]."""

    def init_fn(params: PyTree) -> jax.Array:
        del params
        return jnp.zeros((), jnp.int32)  # The number of leaves is known in `update_fn` only.

    def update_fn(
        updates: Checked, state: jax.Array, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, jax.Array]:
        checked = updates._replace(parameters=params)
        found = jax.tree_util.tree_leaves_with_path(checked)
        paths[:] = [_place(path) for path, _ in found]
        kinds = jnp.stack([_worst(_axis.as_varying(leaf, axis_name)) for _, leaf in found])
        if (weight := extra_args.get("weight")) is not None:
            kinds = jnp.where(own_weight(weight) == 0, FINITE, kinds)
        index = _axis.index(axis_name)
        rows = jnp.arange(_axis.size(axis_name)) == index
        with jax.named_scope("describe_nonfinite/kinds"):
            table = lax.psum(jnp.where(rows[:, None], kinds, 0), _axis.names(axis_name))
        return jax.tree.map(jnp.zeros_like, params), table

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _place(path: tuple[Any, ...]) -> tuple[str, str]:
    """The field of `Checked`, and the leaf in it."""
    return path[0].name, jax.tree_util.keystr(path[1:], simple=True, separator="/")


def _listed(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _findings(kinds: np.ndarray, paths: list[tuple[str, str]]) -> str:
    """What of one worker is not finite; only its parameters if they are not, as all follows."""
    phrases = []
    for field in Checked._fields:
        wrong = [(kind, leaf) for kind, (of, leaf) in zip(kinds, paths, strict=True) if of == field]
        wrong = [(kind, leaf) for kind, leaf in wrong if kind != FINITE]
        if not wrong:
            continue
        leaves = [f"`{leaf}`" for _, leaf in wrong if leaf]
        of = f" of {_listed(leaves)}" if leaves else ""
        phrases.append(f"{NAMES[max(kind for kind, _ in wrong)]} in the {field}{of}")
        if field == "parameters":
            break
    return " and ".join(phrases)


def _sentence(table: np.ndarray, paths: list[tuple[str, str]]) -> str | None:
    workers_of: dict[str, list[str]] = {}
    for worker, kinds in enumerate(table):
        if findings := _findings(kinds, paths):
            workers_of.setdefault(findings, []).append(str(worker))
    if not workers_of:
        return None
    return "; ".join(
        f"worker{'s' * (len(workers) > 1)} {_listed(workers)} of {len(table)}: {findings}"
        for findings, workers in workers_of.items()
    )


def describe_nonfinite(
    loss_fn: LossFn,
    params: PyTree,
    batch: PyTree,
    workers: Mesh | int | Mapping[str, int],
    *,
    axis_name: AxisName = "data",
    shard_axes: AxisName = (),
    has_aux: bool = False,
    model_state: PyTree = None,
    gradients: GradientFn | None = None,
    key: jax.Array | None = None,
    shared: PyTree = None,
    rows_differ: bool = False,
) -> str | None:
    """Which worker has a NaN or an infinity, and in which leaf, to report a loss that has one.

    Each worker evaluates its loss and gradient again. This is compiled at each call, since it is
    for the moment when a loss is not finite. With several processes, all call it. Workers reduce 4
    bytes per leaf and worker.

    Args:
      loss_fn: As for :func:`jaxcomm.make_step`, like all arguments that are not listed here.
      params: The parameters *before* the step. A step donates them: keep a copy, or make the step
        with `donate=False`. If :func:`jaxcomm.skip_nonfinite` has skipped the step, they are those
        that it returned.
      batch: The batch of the step.
      workers: The mesh of the step; or, for simulated workers, their number or sizes of axes.
      axis_name: ...
      shard_axes: ...
      has_aux: ...
      model_state: The model state before the step, if the step has one.
      gradients: ...
      key: The key of the step, if it was called with one.
      shared: What all workers share, if the step was called with it.
      rows_differ: ...

    Returns:
      For example ``"worker 2 of 8: NaN in the loss and NaN in the gradient of `kernel`"``; None if
      all losses and gradients are finite. Then the aggregator or the optimizer made the update
      non-finite, for instance since a codec overflowed. A worker of weight 0 is not checked.

    Raises:
      ValueError: Under the conditions of :func:`jaxcomm.make_step`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.training import describe_nonfinite
      >>> loss_fn = lambda params, x: jnp.mean((x * params["w"] - 1) ** 2)
      >>> batch = jnp.ones(8).at[5].set(jnp.nan)
      >>> print(describe_nonfinite(loss_fn, {"w": jnp.float32(2)}, batch, workers=4))
      worker 2 of 4: NaN in the loss and NaN in the gradient of `w`
    """
    axes = [*workers.axis_names] if isinstance(workers, Mesh) else []
    axes = [*workers] if isinstance(workers, Mapping) else axes
    names = (*_axis.names(axis_name), *_axis.names(shard_axes))
    local = (*_axis.names(axis_name), *(name for name in axes if name not in names))
    has_model_state = model_state is not None
    paths: list[tuple[str, str]] = []
    tx = _recorder(axis_name, paths)
    own = _gradients(gradients, has_aux, has_model_state, local)
    options: dict[str, Any] = {"axis_name": axis_name, "has_aux": has_aux, "metrics": "own"}
    options |= {"has_model_state": has_model_state, "gradients": own, "donate": False}
    options["rows_differ"] = rows_differ
    if isinstance(workers, Mesh):
        step = make_step(loss_fn, tx, workers, shard_axes=shard_axes, **options)
    else:
        step = simulate(loss_fn, tx, workers, **options)
    carry = (params, model_state) if has_model_state else (params,)
    *_, table, _ = step(*carry, tx.init(params), batch, key=key, shared=shared)
    return _sentence(np.asarray(table), paths)
