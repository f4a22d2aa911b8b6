"""An averaging round: the weighted mean displacement of workers, and a step of the outer optimizer.

Before it are the steps of each worker, which are counted; after it, the updates to the new anchor.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PerWorker, PyTree
from jaxcomm._mesh import is_all_manual
from jaxcomm._require import own_weight, presence, weight_dtype
from jaxcomm.synchronization._trees import chosen, narrow, wide


class Steps(NamedTuple):
    """The steps of a worker since the last averaging round; stored with a leading axis `[1]`."""

    weight: jax.Array  # float32[], or float64[] if a parameter is: the sum of the applied steps'
    skipped_steps: jax.Array  # float32[], the number of skipped non-finite steps


@jax.named_scope("anchor")
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


def initial_diagnostics() -> dict[str, jax.Array]:
    """The diagnostics before the first averaging round."""
    return {
        "skipped_steps": jnp.zeros((), jnp.float32),
        "skipped_exchanges": jnp.zeros((), jnp.float32),
    }


class Averaging(NamedTuple):
    """What averaging rounds keep; equal on all workers except as the aggregator marks."""

    anchor: PyTree  # the global parameters after the last round, in float32 at least
    aggregator: Any
    outer: Any
    unsent: PerWorker  # each worker's steps that the next round counts
    succeeded: jax.Array  # bool[], whether the last round succeeded; if late, is under way
    counts: dict[str, jax.Array]  # float32[], `skipped_steps` before it, `skipped_exchanges` rounds


def outer_step(
    outer: optax.GradientTransformation,
    mean: PyTree,
    state: Any,
    anchor: PyTree,
    **extra_args: Any,
) -> tuple[PyTree, Any]:
    r"""The anchor after a step on the mean displacement, :math:`a + \mathrm{outer}(-\bar d)`."""
    descent = jax.tree.map(jnp.negative, mean)
    update = optax.with_extra_args_support(outer).update
    change, state = update(descent, state, anchor, **extra_args)
    return optax.apply_updates(anchor, change), state


class How(NamedTuple):
    """How a worker takes part in a round."""

    participates: jax.Array  # bool[]
    weighted: bool  # whether the user passes weights
    axis_name: AxisName
    extra_args: Mapping[str, Any]  # of the step, for the aggregator and the outer optimizer


class Averaged(NamedTuple):
    """The mean of a round, before the outer optimizer."""

    mean: PyTree  # equal on all workers
    weight: jax.Array  # [], the weight of this worker
    total: jax.Array  # [], the sum of the weights of all workers


def averaging_round(
    aggregator: optax.GradientTransformationExtraArgs,
    outer: optax.GradientTransformation,
    before: Averaging,
    displacements: PyTree,
    how: How,
    mixed: Callable[[Averaged], PyTree] | None = None,
) -> tuple[Averaging, Averaged]:
    r"""A step of the outer optimizer on the mean displacement, weighted by the applied steps.

    .. math:: a \gets a + \mathrm{outer}\Big(\frac{\sum_i W_i\, (a - x_i)}{\sum_i W_i}\Big)

    A worker adds nothing if it applied no step, is absent, or has a displacement that is not
    finite. Its memory of earlier messages then stays finite. A negative or non-finite weight is a
    user error: it makes the mean and the anchor NaN on all workers. A round whose anchor is not
    finite otherwise, for example because a codec exceeds its capacity, changes nothing but
    `succeeded` and `counts`: workers continue locally and keep their displacements. Sends two
    float32 in addition to the aggregator's messages.

    Args:
      aggregator: Computes the mean. If the user passes weights, it receives the weights. Otherwise
        it receives scaled displacements, since not every aggregator accepts weights.
      outer: The outer optimizer.
      before: The result of the last round, with the steps that this one counts as `unsent`.
      displacements: :math:`x_i - a`.
      how: How the worker takes part.
      mixed: What this worker's outer optimizer gets in place of the mean, if anchors differ by
        worker. Whether the round succeeds then depends on the mean alone, which is equal.
    """
    axis_name, participates = how.axis_name, how.participates
    steps = _axis.own(before.unsent, axis_name)
    finite = _is_finite(displacements)
    local_weight = jnp.where(participates & finite, steps.weight, 0)
    skipped_steps = jnp.where(
        participates, jnp.maximum(steps.skipped_steps, jnp.where(finite, 0.0, 1.0)), 0
    )
    both = local_weight, skipped_steps.astype(local_weight.dtype)
    local = _axis.local_params(both, axis_name=axis_name)
    # Beside sharded parameters, an array might be sharded too, for all that the types say.
    with jax.named_scope("weight"):
        total, skipped_by_all = lax.psum(jnp.stack(local) if is_all_manual() else local, axis_name)
    extra = {**how.extra_args, "weight": local_weight} if how.weighted else how.extra_args

    def weigh(x: jax.Array) -> jax.Array:
        share = local_weight.astype(x.dtype) * _axis.size(axis_name) / total.astype(x.dtype)
        return jnp.where(local_weight == 0, 0, x if how.weighted else x * share)

    mean, aggregated = aggregator.update(
        jax.tree.map(weigh, displacements), before.aggregator, before.anchor, **extra
    )
    mean = jax.tree.map(lambda x: jnp.where(jnp.isfinite(total), x, jnp.nan), mean)
    averaged = Averaged(mean, local_weight, total)
    anchor, outer_state = outer_step(
        outer,
        mean if mixed is None else mixed(averaged),
        before.outer,
        before.anchor,
        **how.extra_args,
    )
    succeeded = _is_finite(anchor if mixed is None else mean) | ~jnp.isfinite(total)
    skipped = before.counts["skipped_steps"] + skipped_by_all.astype(jnp.float32)
    failed = before.counts["skipped_exchanges"] + 1
    unsent = jax.tree.map(lambda x: jnp.where(participates, 0, x), steps)
    after = Averaging(
        anchor=anchor,
        aggregator=aggregated,
        outer=outer_state,
        unsent=_axis.marked(unsent, axis_name),
        succeeded=jnp.ones((), bool),
        counts={**before.counts, "skipped_steps": skipped},
    )
    local_result = before._replace(
        succeeded=jnp.zeros((), bool), counts={**before.counts, "skipped_exchanges": failed}
    )
    return chosen(succeeded, after, local_result), averaged


def mean_of_floats(
    aggregator: optax.GradientTransformationExtraArgs,
    floats: PyTree,
    weight: jax.Array,
    total: jax.Array,
    participates: jax.Array,
) -> tuple[PyTree, jax.Array]:
    """The mean over the counted workers, and whether this worker takes it: if any was counted."""
    means, _ = aggregator.update(wide(floats), optax.EmptyState(), weight=weight)
    takes = participates & (total > 0)
    return chosen(takes, narrow(means, floats), floats), takes


def updates_of(
    after: Averaging, params: PyTree, updates: PyTree, participates: jax.Array
) -> PyTree:
    """The updates that move a participant to the anchor; those of others, or after a failure."""
    applies = participates & after.succeeded
    return chosen(applies, updates_to(after.anchor, params), updates)
