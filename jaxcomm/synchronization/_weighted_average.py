"""Averaging rounds: per-worker step counts, and the weighted mean of the displacements."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PerWorker, PyTree
from jaxcomm._mesh import is_all_manual
from jaxcomm._require import own_weight, presence, weight_dtype
from jaxcomm.synchronization._trees import narrow, wide


class Steps(NamedTuple):
    """The steps of a worker since the last averaging round; stored with a leading axis `[1]`."""

    weight: jax.Array  # float32[], or float64[] if a parameter is: the sum of the applied steps'
    skipped_steps: jax.Array  # float32[], the number of skipped non-finite steps


def first_anchor(params: PyTree, axis_name: AxisName) -> PyTree:
    """Broadcasts the first worker's parameters bit for bit, in float32 at least."""

    def of_the_first(x: jax.Array) -> jax.Array:
        first = jnp.where(_axis.index(axis_name) == 0, x, jnp.zeros((), x.dtype))
        return lax.psum(_axis.as_varying(first, axis_name), axis_name)

    return jax.tree.map(of_the_first, wide(params))


def no_steps(params: PyTree, axis_name: AxisName) -> PerWorker:
    """The value before the first step."""
    zeros = Steps(jnp.zeros((), weight_dtype(params)), jnp.zeros((), jnp.float32))
    return _axis.marked(zeros, axis_name)


def require_params(params: PyTree, axis_name: AxisName) -> None:
    """Raises unless parameters are passed and differ by worker."""
    if params is None:
        raise ValueError("Local steps need parameters: `tx.update(updates, state, params)`.")
    _axis.require_own(params, axis_name)


def takes_part(present: jax.Array | None, axis_name: AxisName) -> jax.Array:
    """Whether this worker participates, bool[].

    Raises:
      ValueError: If `present` does not have one bool per worker.
    """
    if present is None:
        return jnp.ones((), bool)
    return presence(present, _axis.size(axis_name))[_axis.index(axis_name)]


def _is_finite(tree: PyTree) -> jax.Array:
    finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(finite)) if finite else jnp.ones((), bool)


def apply_finite_step(
    params: PyTree,
    updates: PyTree,
    done: PerWorker,
    weight: jax.Array | float | None,
    axis_name: AxisName,
) -> tuple[PyTree, PerWorker]:
    r"""Applies a local step of this worker if it is finite and has a nonzero weight.

    .. math:: \Delta_i \gets 0 \text{ if } w_i = 0 \text{ or } x_i + \Delta_i
              \text{ is not finite, else } W_i \gets W_i + w_i

    NaN therefore never enters the parameters; no later update could remove it. Nothing is sent.

    Raises:
      ValueError: As `own_weight` does, or if `done` has another number of workers.
    """
    local_weight = own_weight(1.0 if weight is None else weight, weight_dtype(params))
    finite = _is_finite(jax.tree.map(jnp.add, params, updates))
    applied = finite & (local_weight != 0)
    # An invalid weight is a user error, not a failed step.
    counted = jnp.where(applied | jnp.isnan(local_weight), local_weight, 0)
    skipped_steps = jnp.where(finite | (local_weight == 0), 0.0, 1.0).astype(jnp.float32)
    before = _axis.own(done, axis_name)
    after = Steps(before.weight + counted, before.skipped_steps + skipped_steps)
    updates = jax.tree.map(lambda u: jnp.where(applied, u, jnp.zeros((), u.dtype)), updates)
    return updates, _axis.marked(after, axis_name)


def displacement(anchor: PyTree, params: PyTree, updates: PyTree) -> PyTree:
    """The displacement of a worker from the anchor after its step, in the anchor's dtype.

    Parameters of 16 bits are rounded anchors. The displacement is measured from the rounded anchor,
    so the anchor keeps the rounding error.
    """

    def displacement_of(a: jax.Array, x: jax.Array, u: jax.Array) -> jax.Array:
        return x.astype(a.dtype) - a.astype(x.dtype).astype(a.dtype) + u.astype(a.dtype)

    return jax.tree.map(displacement_of, anchor, params, updates)


def updates_to(target: PyTree, params: PyTree) -> PyTree:
    """The updates that move the parameters to a target in a wider dtype."""
    rounded = wide(narrow(target, params))
    return narrow(jax.tree.map(jnp.subtract, rounded, wide(params)), params)


class WeightedAverage(NamedTuple):
    """The result of an averaging round."""

    mean: PyTree  # equal on all workers
    aggregator: Any
    done: PerWorker  # reset for workers that participated
    weight: jax.Array  # [], the weight of this worker
    total: jax.Array  # [], the sum of the weights of all workers
    skipped_steps: jax.Array  # float32[], of all participants since their last averaging round


def select_if_finite(
    averaged: WeightedAverage, anchor: PyTree, averaged_result: PyTree, local_result: PyTree
) -> PyTree:
    """Returns `averaged_result` if the new anchor is finite, and otherwise `local_result`.

    The anchor is not finite if, for example, a codec exceeds its capacity. Workers then continue
    locally and keep their displacements. An invalid weight is a user error: it makes the anchor NaN
    on all workers.
    """
    succeeded = _is_finite(anchor) | ~jnp.isfinite(averaged.total)
    return jax.tree.map(lambda x, y: jnp.where(succeeded, x, y), averaged_result, local_result)


def initial_diagnostics() -> dict[str, jax.Array]:
    """The diagnostics before the first averaging round."""
    return {
        "skipped_steps": jnp.zeros((), jnp.float32),
        "skipped_exchanges": jnp.zeros((), jnp.float32),
    }


def weighted_average(
    aggregator: optax.GradientTransformationExtraArgs,
    state: Any,
    anchor: PyTree,
    displacements: PyTree,
    done: PerWorker,
    *,
    participates: jax.Array,
    weighted: bool,
    axis_name: AxisName,
    extra_args: Mapping[str, Any],
) -> WeightedAverage:
    r"""The mean of the displacements of workers, weighted by their applied steps.

    .. math:: \frac{\sum_i W_i\, (x_i - a)}{\sum_i W_i}

    A worker adds nothing if it applied no step, is absent, or has a displacement that is not
    finite. Its memory of earlier messages then stays finite. A negative or non-finite weight makes
    the mean NaN on all workers. Sends two float32 in addition to the aggregator's messages.

    Args:
      aggregator: Computes the mean.
      state: The state of the aggregator.
      anchor: :math:`a`.
      displacements: :math:`x_i - a`.
      done: :math:`W_i`, and the number of skipped steps.
      participates: bool[], whether this worker participates.
      weighted: Whether the user passes weights. If so, the aggregator receives the weights.
        Otherwise it receives scaled displacements, since not every aggregator accepts weights.
      axis_name: The mesh axis, or axes, of the workers.
      extra_args: The extra arguments of the step, for the aggregator.
    """
    steps = _axis.own(done, axis_name)
    finite = _is_finite(displacements)
    local_weight = jnp.where(participates & finite, steps.weight, 0)
    skipped_steps = jnp.where(
        participates, jnp.maximum(steps.skipped_steps, jnp.where(finite, 0.0, 1.0)), 0
    )
    both = local_weight, skipped_steps.astype(local_weight.dtype)
    local = _axis.local_params(both, axis_name=axis_name)
    # Beside sharded parameters, an array might be sharded too, for all that the types say.
    total, skipped_by_all = lax.psum(jnp.stack(local) if is_all_manual() else local, axis_name)
    extra = {**extra_args, "weight": local_weight} if weighted else extra_args

    def weigh(x: jax.Array) -> jax.Array:
        share = local_weight.astype(x.dtype) * _axis.size(axis_name) / total.astype(x.dtype)
        return jnp.where(local_weight == 0, 0, x if weighted else x * share)

    mean, state = aggregator.update(jax.tree.map(weigh, displacements), state, anchor, **extra)
    mean = jax.tree.map(lambda x: jnp.where(jnp.isfinite(total), x, jnp.nan), mean)
    after = jax.tree.map(lambda x: jnp.where(participates, 0, x), steps)
    return WeightedAverage(
        mean,
        state,
        _axis.marked(after, axis_name),
        local_weight,
        total,
        skipped_by_all.astype(jnp.float32),
    )
