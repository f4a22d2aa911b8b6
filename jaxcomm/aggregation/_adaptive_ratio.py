"""A compression ratio that adapts to the measured compression error."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from jaxcomm._contract import Aggregator, AxisName, Codec, PyTree, require_state
from jaxcomm._mesh import collective_switch
from jaxcomm._require import Positive, Range, checked
from jaxcomm.aggregation._aggregator import common_axes, common_state, needs_whole
from jaxcomm.aggregation._all_gather import all_gather_mean
from jaxcomm.aggregation._coded import AggregatorOptions, takes_options


class AdaptiveRatioState(NamedTuple):
    """The state of `adaptive_ratio`, equal on all workers except `PerWorker` parts of `inner`."""

    stage: jax.Array  # int32[], the index of the next ratio
    steps_below_target: jax.Array  # int32[], since the error was above it; at most `patience`
    inner: Any  # the state that all stages share
    diagnostics: Any = ()  # dict of float32[], with `diagnostics=True`


def _next(
    state: AdaptiveRatioState, error: jax.Array, target: float, patience: int, last: int
) -> tuple[jax.Array, jax.Array]:
    """The next `stage` and `steps_below_target` after a step with this error."""
    too_coarse = error > target
    steps = jnp.where(too_coarse, 0, jnp.minimum(state.steps_below_target + 1, patience))
    coarser = (steps >= patience).astype(jnp.int32)
    moved = jnp.clip(state.stage + jnp.where(too_coarse, 1, -coarser), 0, last)
    finite = jnp.isfinite(error)
    after = jnp.where(finite, steps, state.steps_below_target)
    return jnp.where(finite, moved, state.stage), after


@checked
@takes_options
def adaptive_ratio(
    codec_for: Callable[[float], Codec],
    ratios: Sequence[float],
    *,
    target_error: Annotated[float, Range(above=0)],
    patience: Positive = 50,
    aggregator: Callable[..., optax.GradientTransformationExtraArgs] | None = None,
    axis_name: AxisName = "data",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Chooses the smallest of several ratios whose measured compression error meets a target.

    .. math:: \epsilon^t = \frac{1}{n} \sum_i \frac{\|q_i^t - a_i^t\|^2}{\|a_i^t\|^2}, \qquad
              r^{t+1} = \begin{cases}
              \text{the next larger ratio} & \epsilon^t > \epsilon \\
              \text{the next smaller} & \epsilon^t \le \epsilon \text{, and no ratio was too small }
              \text{for } p \text{ steps} \\
              r^t & \text{otherwise} \end{cases}

    Worker :math:`i` encodes :math:`a_i`, its gradient (under feedback, plus its residual).
    Receivers decode :math:`q_i`. :math:`\epsilon` is `target_error`, and :math:`p` is `patience`.
    Training starts at the largest ratio. If a few coordinates hold most of the squared norm, the
    ratio falls by one stage per step until the error exceeds the target. It then rises by one stage
    and stays there. Only one step in :math:`p + 1` tries the smaller ratio again.

    The error is a mean over workers, so all workers choose the same ratio. A worker sends the
    payload of the current ratio, and 12 bytes in one small all-reduce.
    :func:`jaxcomm.wire.account` reports each ratio as a branch, and counts the largest.

    Args:
      codec_for: A function from a ratio to a codec. The memory of the codec must not depend on the
        ratio.
      ratios: The ratios to choose from, in ascending order.
      target_error: :math:`\epsilon`, a positive bound on the relative squared error. A target of 1
        or more allows a codec that sends nothing.
      patience: :math:`p`, a Python int of at least 1. At 1, every other step may be too coarse.
      aggregator: The constructor of the mean. Default: `all_gather_mean`. Use `all_reduce_mean` or
        `two_stage_mean` if the codecs allow it.
      axis_name: The mesh axis, or axes, of the workers.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`; `diagnostics` also reports the
        `ratio` of the step.

    Returns:
      A transformation to place before the optimizer, with the guarantees of `aggregator`. A step
      with a non-finite update does not change the ratio.

    Raises:
      ValueError: If an option is out of range, or the memories of the codecs differ; in `update`,
        if `axis_name` is not bound or an update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> from jaxcomm.compression.feedback import error_feedback
      >>> from jaxcomm.compression.sparsifiers import top_k
      >>> tx = jaxcomm.adaptive_ratio(
      ...     lambda ratio: error_feedback(top_k(ratio=ratio)),
      ...     [0.25, 0.5, 1.0],
      ...     target_error=0.1,
      ... )
      >>> def three_steps(g):
      ...     state = tx.init(g)
      ...     for _ in range(3):
      ...         _, state = tx.update(g, state)
      ...     return state.stage
      >>> one_large = jnp.array([[10.0, 1.0, 1.0, 1.0]])
      >>> print(jax.jit(jax.vmap(three_steps, axis_name="data"))(one_large))
      [0]

    References:
      Tang et al., `Communication-Efficient Distributed Deep Learning: A Comprehensive Survey
      <https://arxiv.org/abs/2003.06307>`_, 2020. The survey names a ratio that adapts to training
      as future work; the rule is ours.
    """
    steps = tuple(ratios)
    if not steps or any(small >= large for small, large in itertools.pairwise(steps)):
        raise ValueError(f"`ratios` must be at least one number, in ascending order, got {ratios}.")
    diagnostics = options.get("diagnostics", False)
    stage_options: AggregatorOptions = {**options, "diagnostics": True}
    stages = [
        (aggregator or all_gather_mean)(codec_for(ratio), axis_name=axis_name, **stage_options)
        for ratio in steps
    ]

    def extract_metrics(inner: Any, ratio: jax.Array) -> tuple[Any, Any]:
        """Moves `diagnostics` from the inner state, so that it is reported only once."""
        metrics = {**inner.diagnostics, "ratio": ratio} if diagnostics else ()
        return inner._replace(diagnostics=()), metrics

    def init_fn(params: PyTree) -> AdaptiveRatioState:
        first = common_state(stages, params)
        inner, metrics = extract_metrics(first, jnp.zeros((), jnp.float32))
        stage, steps_below_target = (jnp.asarray(n, jnp.int32) for n in (len(steps) - 1, patience))
        return AdaptiveRatioState(stage, steps_below_target, inner, metrics)

    def update_fn(
        updates: PyTree, state: AdaptiveRatioState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, AdaptiveRatioState]:
        require_state(state, AdaptiveRatioState, "`adaptive_ratio`")
        if not any(x.size for x in jax.tree.leaves(updates)):
            return updates, state
        result, inner = collective_switch(
            state.stage,
            [partial(stage.update, updates, state.inner, params, **extra_args) for stage in stages],
        )
        stage, steps_below_target = _next(
            state, inner.diagnostics["compression_error"], target_error, patience, len(steps) - 1
        )
        inner, metrics = extract_metrics(inner, jnp.asarray(steps, jnp.float32)[state.stage])
        return result, AdaptiveRatioState(stage, steps_below_target, inner, metrics)

    return Aggregator(
        init_fn, update_fn, common_axes(stages, "adaptive_ratio"), needs_whole=needs_whole(stages)
    )
