"""Budgets of workers that adapt to the measured speeds of their links."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm import _axis
from jaxcomm._collectives import to_message
from jaxcomm._contract import Aggregator, AxisName, Codec, Context, PyTree, require_state
from jaxcomm._mesh import collective_switch
from jaxcomm._require import Positive, Range, checked
from jaxcomm.aggregation._aggregator import common_axes, common_state, needs_whole
from jaxcomm.aggregation._all_gather import encode_local
from jaxcomm.aggregation._budgeted import BudgetPlan, CodecOf, budgeted_mean, plan_of
from jaxcomm.aggregation._coded import AggregatorOptions, takes_options
from jaxcomm.aggregation._exchange import of_all_workers


class AdaptiveBudgetsState(NamedTuple):
    """The state of `adaptive_budgets`, equal on all workers except `PerWorker` parts of `inner`."""

    plan: jax.Array  # int32[], the index of the next plan
    steps_to_spare: jax.Array  # int32[], for how long an earlier plan would meet the target
    inner: Any  # the state that all plans share


def _row_bytes(codec: Codec, width: int) -> int:
    """The bytes of a message with one row of `width` coordinates."""

    def message() -> jax.Array:
        x = jnp.zeros(width, jnp.float32)
        return to_message(encode_local(codec, Context.of(x), x)[0])

    shape = jax.eval_shape(message)
    return math.prod(shape.shape) * shape.dtype.itemsize


def link_bytes(plan: BudgetPlan, mean_codec: Codec, size: int) -> np.ndarray:
    """What each worker sends and receives in a step for one unit of `size`, float64[2, workers]."""
    workers, count = len(plan.kinds), len(plan.owners)
    width = -(-size // count)
    per_row = np.array([_row_bytes(codec, width) for codec in plan.codecs], float)
    first, owns = per_row[list(plan.kinds)], plan.slots >= 0
    to_all = (workers - 1) * _row_bytes(mean_codec, width)
    sent = first * (count - owns)
    received = np.where(owns, first.sum() - first, 0)
    return np.stack([sent + to_all, received + to_all])


def _next(
    state: AdaptiveBudgetsState, seconds: jax.Array, target: float, patience: int
) -> tuple[jax.Array, jax.Array]:
    """The next `plan` and `steps_to_spare`, for the predicted seconds of each plan."""
    fits = seconds <= target
    wanted = jnp.where(jnp.any(fits), jnp.argmax(fits), jnp.argmin(seconds)).astype(jnp.int32)
    has_slack = wanted < state.plan
    steps = jnp.where(has_slack, jnp.minimum(state.steps_to_spare + 1, patience), 0)
    moves = (wanted > state.plan) | (steps >= patience)
    known = jnp.all(jnp.isfinite(seconds) & (seconds > 0))
    plan = jnp.where(known & moves, wanted, state.plan)
    return plan, jnp.where(known, jnp.where(moves, 0, steps), state.steps_to_spare)


@checked
@takes_options
def adaptive_budgets(
    codec_for: CodecOf,
    budget: Any,
    plans: Sequence[Mapping[int, Any]],
    *,
    target_seconds: Annotated[float, Range(above=0)],
    patience: Positive = 50,
    mean_codec: Codec | None = None,
    axis_name: AxisName = "data",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Chooses the budgets of :func:`budgeted_mean` by the measured speeds of the workers' links.

    .. math:: T_p = \max_i c_i \max(\text{sent}_{p,i}, \text{received}_{p,i}), \qquad
              \text{wanted} = \min \{p : T_p \le T\}

    Each step takes the seconds per byte :math:`c_i` of each worker's link, as measured by the
    caller. :math:`T_p` are the seconds on the slowest link under plan :math:`p`, and :math:`T` is
    `target_seconds`. If no plan meets it, the one of least seconds is wanted. The rule is that of
    :func:`jaxcomm.adaptive_ratio`: a later plan is used in the next step; an earlier one, which
    sends more, only after it was wanted for `patience` steps in a row. Measurements of each worker
    are gathered, :math:`4 (n - 1)` bytes per worker, so all workers choose the same plan. A step
    with a measurement that is not finite, or not positive, changes nothing.

    The payloads of the plans differ in shape, so each is a branch of the program, and the bytes are
    really those of the plan in use. :func:`jaxcomm.wire.account` reports each branch, and counts
    the largest.

    Args:
      codec_for: As for :func:`budgeted_mean`.
      budget: As for :func:`budgeted_mean`.
      plans: The dicts `slow` of :func:`budgeted_mean` to choose from, the most accurate first; `{}`
        is a plan without slow workers. Training starts with the first.
      target_seconds: :math:`T`, the positive number of seconds that a step may communicate.
      patience: A Python int of at least 1.
      mean_codec: As for :func:`budgeted_mean`.
      axis_name: The mesh axis, or axes, of the workers.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`.

    Returns:
      A transformation whose `update` takes `seconds_per_byte=`: a float32 scalar that differs by
      worker, or float32[workers] that is equal on all, as steps of :func:`jaxcomm.make_step` pass
      it. It has the guarantees of :func:`budgeted_mean`.

    Raises:
      ValueError: If an option is out of range, or as for :func:`budgeted_mean`; in `update`, if
        `seconds_per_byte` is missing or has another shape.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> from jaxcomm.aggregation import adaptive_budgets
      >>> from jaxcomm.compression.quantizers import dither
      >>> codec_for, plans = lambda levels: dither(levels=levels), [{}, {0: 1}, {1: 1}]
      >>> tx = adaptive_budgets(codec_for, 127, plans, target_seconds=0.25)
      >>> def step(x, seconds_per_byte):
      ...     _, state = tx.update(x, tx.init(x), seconds_per_byte=seconds_per_byte)
      ...     return state.plan
      >>> speeds = jnp.array([1e-4, 1e-4, 1e-4, 1e-4]).at[1].set(3e-4)
      >>> print(jax.jit(jax.vmap(step, axis_name="data"))(jnp.ones((4, 600)), speeds))
      [2 2 2 2]

    References:
      Tang et al., `Communication-Efficient Distributed Deep Learning: A Comprehensive Survey
      <https://arxiv.org/abs/2003.06307>`_, 2020. The rule is ours.
    """
    stages = [
        budgeted_mean(
            codec_for, budget, slow=plan, mean_codec=mean_codec, axis_name=axis_name, **options
        )
        for plan in plans
    ]
    own_codec = codec_for(budget) if mean_codec is None else mean_codec

    def init_fn(params: PyTree) -> AdaptiveBudgetsState:
        zero = jnp.zeros((), jnp.int32)
        return AdaptiveBudgetsState(zero, zero, common_state(stages, params))

    def update_fn(
        updates: PyTree,
        state: AdaptiveBudgetsState,
        params: PyTree = None,
        *,
        seconds_per_byte: jax.Array | float | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, AdaptiveBudgetsState]:
        require_state(state, AdaptiveBudgetsState, "`adaptive_budgets`")
        workers = _axis.size(axis_name)
        speeds = of_all_workers(seconds_per_byte, "seconds_per_byte", axis_name)
        if not jax.tree.leaves(updates):
            return updates, state
        result, inner = collective_switch(
            state.plan,
            [partial(stage.update, updates, state.inner, params, **extra_args) for stage in stages],
        )
        size = sum(x.size for x in jax.tree.leaves(updates))
        per_plan = np.stack(
            [
                link_bytes(plan_of(codec_for, budget, slow, workers), own_codec, size).max(axis=0)
                for slow in plans
            ]
        )
        seconds = jnp.max(jnp.asarray(per_plan, jnp.float32) * speeds[None], axis=1)
        plan, steps = _next(state, seconds, target_seconds, patience)
        return result, AdaptiveBudgetsState(plan, steps, inner)

    return Aggregator(
        init_fn, update_fn, common_axes(stages, "adaptive_budgets"), needs_whole=needs_whole(stages)
    )
