"""An averaging round: the mean displacement of the workers, and a step of the outer optimizer."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm._contract import AxisName, PerWorker, PyTree
from jaxcomm.synchronization._weighted_average import (
    WeightedAverage,
    select_if_finite,
    updates_to,
    weighted_average,
)


class Averaging(NamedTuple):
    """What averaging rounds keep; equal on all workers except as the aggregator marks."""

    anchor: PyTree  # the global parameters after the last round, in float32 at least
    aggregator: Any
    outer: Any
    unsent: PerWorker  # each worker's steps that the last round should have counted, but did not
    succeeded: jax.Array  # bool[], whether the last round succeeded; if late, is under way
    counts: dict[str, jax.Array]  # float32[], `skipped_steps` before it, `skipped_exchanges` rounds


def outer_step(
    outer: optax.GradientTransformationExtraArgs,
    mean: PyTree,
    state: Any,
    anchor: PyTree,
    **extra_args: Any,
) -> tuple[PyTree, Any]:
    r"""The anchor after a step on the mean displacement, :math:`a + \mathrm{outer}(-\bar d)`."""
    descent = jax.tree.map(jnp.negative, mean)
    change, state = outer.update(descent, state, anchor, **extra_args)
    return optax.apply_updates(anchor, change), state


def averaging_round(
    aggregator: optax.GradientTransformationExtraArgs,
    outer: optax.GradientTransformationExtraArgs,
    before: Averaging,
    displacements: PyTree,
    done: PerWorker,
    *,
    participates: jax.Array,
    weighted: bool,
    axis_name: AxisName,
    extra_args: Mapping[str, Any],
) -> tuple[Averaging, WeightedAverage]:
    r"""A step of the outer optimizer on the mean displacement, weighted by the applied steps.

    .. math:: a \gets a + \mathrm{outer}\Big(\frac{\sum_i W_i\, (a - x_i)}{\sum_i W_i}\Big)

    A round whose new anchor is not finite changes nothing but `unsent` and `counts`.

    `before` is the result of the last round, whose `unsent` steps count in this one. The other
    arguments, except `outer`, are those of `weighted_average`.
    """
    steps = jax.tree.map(jnp.add, before.unsent, done)
    averaged = weighted_average(
        aggregator,
        before.aggregator,
        before.anchor,
        displacements,
        steps,
        participates=participates,
        weighted=weighted,
        axis_name=axis_name,
        extra_args=extra_args,
    )
    anchor, outer_state = outer_step(
        outer, averaged.mean, before.outer, before.anchor, **extra_args
    )
    skipped_steps = before.counts["skipped_steps"] + averaged.skipped_steps
    failed = before.counts["skipped_exchanges"] + 1
    averaged_result = Averaging(
        anchor=anchor,
        aggregator=averaged.aggregator,
        outer=outer_state,
        unsent=averaged.done,
        succeeded=jnp.ones((), bool),
        counts={**before.counts, "skipped_steps": skipped_steps},
    )
    local_result = before._replace(
        unsent=steps,
        succeeded=jnp.zeros((), bool),
        counts={**before.counts, "skipped_exchanges": failed},
    )
    return select_if_finite(averaged, anchor, averaged_result, local_result), averaged


def updates_of(
    after: Averaging, params: PyTree, updates: PyTree, participates: jax.Array
) -> PyTree:
    """The updates that move a participant to the anchor; those of others, or after a failure."""
    applies = participates & after.succeeded
    return jax.tree.map(
        lambda a, u: jnp.where(applies, a, u), updates_to(after.anchor, params), updates
    )
