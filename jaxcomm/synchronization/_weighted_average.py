"""Where workers that step by themselves meet: what of their steps counts, and the mean of it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import AxisName, PerWorker, PyTree
from jaxcomm._require import own_weight
from jaxcomm.synchronization._wide import narrow, wide


class Steps(NamedTuple):
    """Of a worker, since it last met the others; `[1]` each in a state."""

    weight: jax.Array  # float32[], of the steps it has taken, 1 each where none is given
    skipped_steps: jax.Array  # float32[], how many it has not, since they were not finite


def first_anchor(params: PyTree, axis_name: AxisName) -> PyTree:
    """The first worker's parameters, on all, bit for bit, in float32 at least."""

    def of_the_first(x: jax.Array) -> jax.Array:
        first = jnp.where(_axis.index(axis_name) == 0, x, jnp.zeros((), x.dtype))
        return lax.psum(_axis.as_varying(first, axis_name), axis_name)

    return jax.tree.map(of_the_first, wide(params))


def marked(steps: Steps, axis_name: AxisName) -> PerWorker:
    """As each worker's own."""
    return PerWorker({_axis.label(axis_name): jax.tree.map(lambda x: x[None], steps)})


def no_steps(axis_name: AxisName) -> PerWorker:
    """Before the first step."""
    return marked(Steps(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)), axis_name)


def require_params(params: PyTree, axis_name: AxisName) -> None:
    """Raises unless there are parameters, each worker's own."""
    if params is None:
        raise ValueError("Local steps need parameters: `tx.update(updates, state, params)`.")
    _axis.require_own(params, axis_name)


def is_here(present: jax.Array | None, axis_name: AxisName) -> jax.Array:
    """Whether this worker takes part, bool[].

    Raises:
      ValueError: If `present` is not one bool a worker.
    """
    if present is None:
        return jnp.ones((), bool)
    if jnp.shape(present) != (_axis.size(axis_name),):
        raise ValueError(
            f"`present` must be one bool a worker, [{_axis.size(axis_name)}], got shape "
            f"{jnp.shape(present)}."
        )
    return jnp.asarray(present).astype(bool)[_axis.index(axis_name)]


def _is_finite(tree: PyTree) -> jax.Array:
    fine = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(fine)) if fine else jnp.ones((), bool)


def take_step(
    params: PyTree,
    updates: PyTree,
    done: PerWorker,
    weight: jax.Array | float | None,
    axis_name: AxisName,
) -> tuple[PyTree, PerWorker]:
    r"""A step of this worker alone, unless it would not be finite or has no weight.

    .. math:: \Delta_i \gets 0 \text{ where } w_i = 0 \text{ or } x_i + \Delta_i
              \text{ is not finite, else } W_i \gets W_i + w_i

    So NaN never enters parameters, from which no update would bring them back. Nothing is sent.

    Raises:
      ValueError: As `own_weight` does, or if `done` is of another number of workers.
    """
    own = own_weight(1.0 if weight is None else weight)
    finite = _is_finite(jax.tree.map(jnp.add, params, updates))
    taken = finite & (own != 0)
    # A weight that is none is a mistake, and not a step that failed.
    counted = jnp.where(taken | jnp.isnan(own), own, 0)
    skipped_steps = jnp.where(finite | (own == 0), 0.0, 1.0).astype(jnp.float32)
    before = _axis.own(done, axis_name)
    after = Steps(before.weight + counted, before.skipped_steps + skipped_steps)
    updates = jax.tree.map(lambda u: jnp.where(taken, u, jnp.zeros((), u.dtype)), updates)
    return updates, marked(after, axis_name)


def moved_from(anchor: PyTree, params: PyTree, updates: PyTree) -> PyTree:
    """How far a worker is after its step from what it took of the anchor, in the anchor's dtype.

    Parameters of 16 bits are rounded anchors: what the rounding has left is kept in the anchor.
    """

    def moved(a: jax.Array, x: jax.Array, u: jax.Array) -> jax.Array:
        return x.astype(a.dtype) - a.astype(x.dtype).astype(a.dtype) + u.astype(a.dtype)

    return jax.tree.map(moved, anchor, params, updates)


def way_to(target: PyTree, params: PyTree) -> PyTree:
    """The updates that bring parameters to a target in a wider dtype."""
    rounded = wide(narrow(target, params))
    return narrow(jax.tree.map(jnp.subtract, rounded, wide(params)), params)


class Met(NamedTuple):
    """What came of a meeting."""

    mean: PyTree  # equal on all workers
    aggregator: Any
    done: PerWorker  # of who was here, nothing yet
    weight: jax.Array  # float32[], with which this worker was counted
    total: jax.Array  # float32[], of all
    skipped_steps: jax.Array  # float32[], steps that all who are here have left out since the last


def where_met(met: Met, anchor: PyTree, together: PyTree, alone: PyTree) -> PyTree:
    """`together`, unless the new anchor is not finite, where a codec found no room, say.

    Then workers go on `alone`, with all that they have moved. A weight that is none is a mistake,
    and makes the anchor NaN for all.
    """
    came_off = _is_finite(anchor) | ~jnp.isfinite(met.total)
    return jax.tree.map(lambda x, y: jnp.where(came_off, x, y), together, alone)


def initial_diagnostics() -> dict[str, jax.Array]:
    """What meetings tell, before the first."""
    return {"skipped_steps": jnp.zeros((), jnp.float32), "failed": jnp.zeros((), jnp.float32)}


def meet(
    aggregator: optax.GradientTransformationExtraArgs,
    state: Any,
    anchor: PyTree,
    moved: PyTree,
    done: PerWorker,
    *,
    here: jax.Array,
    weighted: bool,
    axis_name: AxisName,
    extra_args: Mapping[str, Any],
) -> Met:
    r"""The mean of what workers have moved, weighted by the steps that they have taken.

    .. math:: \frac{\sum_i W_i\, (x_i - a)}{\sum_i W_i}

    A worker that took no step, is not here, or whose movement is not finite adds nothing, and what
    it remembers of earlier messages stays finite; a weight that was negative or not finite makes
    the mean NaN on all. Sends two float32 besides what the aggregator does.

    Args:
      aggregator: Forms the mean.
      state: Its state.
      anchor: :math:`a`.
      moved: :math:`x_i - a`.
      done: :math:`W_i`, and what was left out.
      here: bool[], whether this worker takes part.
      weighted: Whether the user weighs steps. Then the aggregator is given the weights, and else
        movements that are scaled already, since not every aggregator takes weights.
      axis_name: The mesh axis, or axes, that number the workers.
      extra_args: Of the step, for the aggregator.
    """
    steps = _axis.own(done, axis_name)
    finite = _is_finite(moved)
    own = jnp.where(here & finite, steps.weight, 0)
    skipped_steps = jnp.where(
        here, jnp.maximum(steps.skipped_steps, jnp.where(finite, 0.0, 1.0)), 0
    )
    told = _axis.as_varying(jnp.stack([own, skipped_steps]), axis_name)
    total, left_out_by_all = lax.psum(told, axis_name)
    extra = {**extra_args, "weight": own} if weighted else extra_args

    def weigh(x: jax.Array) -> jax.Array:
        share = own.astype(x.dtype) * _axis.size(axis_name) / total.astype(x.dtype)
        return jnp.where(own == 0, 0, x if weighted else x * share)

    mean, state = aggregator.update(jax.tree.map(weigh, moved), state, anchor, **extra)
    mean = jax.tree.map(lambda x: jnp.where(jnp.isfinite(total), x, jnp.nan), mean)
    after = jax.tree.map(lambda x: jnp.where(here, 0, x), steps)
    return Met(mean, state, marked(after, axis_name), own, total, left_out_by_all)
