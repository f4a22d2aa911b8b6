"""Aggregators that run one after another during training, and a learning-rate warm-up."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm._contract import Aggregator, PyTree, require_state
from jaxcomm._mesh import collective_switch
from jaxcomm._noise import following
from jaxcomm._require import Positive, checked
from jaxcomm.aggregation._aggregator import (
    common_axes,
    common_state,
    is_stateless,
    needs_whole,
)


class WarmupState(NamedTuple):
    """The state of `warmup`, equal on all workers except `PerWorker` parts of `inner`."""

    step: jax.Array  # int32[], the number of steps so far
    inner: Any  # the state that all stages share


@checked
def warmup(
    stages: Sequence[optax.GradientTransformationExtraArgs], every: Positive
) -> optax.GradientTransformationExtraArgs:
    r"""Runs each aggregator in turn for `every` steps, then the last one for the rest of training.

    .. math:: (\Delta^t, s^{t+1}) = \mathrm{stage}_{\min(\lfloor t / k \rfloor,\, m - 1)}
              (g_i^t, s^t)

    where :math:`k` is `every` and :math:`m` the number of stages. Gradients change fast early in
    training, so a residual from that time is stale when it is sent. Deep Gradient Compression
    therefore sends a quarter of the coordinates in the first epoch, and a thousandth from the fifth
    on. The payloads of the stages differ in shape, so each stage is a branch of the program. All
    stages share one state, which continues from stage to stage. A worker sends the payload of the
    current stage; :func:`jaxcomm.wire.account` reports each branch, and counts the largest.

    A stage without state, such as :func:`jaxcomm.mean`, may precede any other one. With Adam, two
    exact steps first let its second moments begin at the scale of gradients. Otherwise they begin
    near zero where the first compressed updates are.

    Args:
      stages: Aggregators over the same axes, whose states have the same structure, shapes and
        dtypes; for example, the same codec at decreasing ratios. Stages without state fit all.
      every: The number of steps per stage, a Python int.

    Returns:
      A transformation to place before the optimizer, with the guarantees of the stages.
      `update(..., weight=w)` passes the weight to the stage.

    Raises:
      ValueError: If `every` is not a positive Python int, there is no stage, or the stages average
        over different axes; in `init`, if their states differ.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> from jaxcomm.compression.feedback import error_feedback
      >>> from jaxcomm.compression.sparsifiers import top_k
      >>> stages = [jaxcomm.all_gather_mean(error_feedback(top_k(k=k))) for k in (2, 1)]
      >>> tx = jaxcomm.warmup(stages, every=1)
      >>> def two_steps(g):
      ...     first, state = tx.update(g, tx.init(g))
      ...     second, state = tx.update(g, state)
      ...     return first, second
      >>> for update in jax.vmap(two_steps, axis_name="data")(jnp.array([[3.0, 2.0, 1.0]])):
      ...     print(update)
      [[3. 2. 0.]]
      [[3. 0. 0.]]

    References:
      Lin et al., `Deep Gradient Compression <https://arxiv.org/abs/1712.01887>`_, 2018.
    """
    return in_stages(stages, lambda step: jnp.minimum(step // every, len(stages) - 1), "warmup")


def in_stages(
    stages: Sequence[optax.GradientTransformationExtraArgs],
    stage_of: Callable[[jax.Array], jax.Array],
    user: str,
    period: int = 1,
) -> optax.GradientTransformationExtraArgs:
    """Runs stage number `stage_of(step)`; all stages share one state. Errors name `user`.

    After at most 2^30 steps, `stage_of` must be constant or have the `period`.
    """
    stages = tuple(stages)
    axes = common_axes(stages, user)

    def init_fn(params: PyTree) -> WarmupState:
        return WarmupState(jnp.zeros((), jnp.int32), common_state(stages, params))

    def update_fn(
        updates: PyTree, state: WarmupState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, WarmupState]:
        require_state(state, WarmupState, f"`{user}`")

        def run(stage: optax.GradientTransformationExtraArgs) -> tuple[PyTree, PyTree]:
            if is_stateless(stage, updates):
                return stage.update(updates, stage.init(updates), params, **extra_args)[
                    0
                ], state.inner
            return stage.update(updates, state.inner, params, **extra_args)

        result, inner = collective_switch(
            stage_of(state.step), [partial(run, stage) for stage in stages]
        )
        return result, WarmupState(following(state.step, period), inner)

    return Aggregator(init_fn, update_fn, axes, needs_whole=needs_whole(stages))


@checked
def warmup_schedule(
    learning_rate: optax.ScalarOrSchedule, steps: Positive, workers: Positive
) -> optax.Schedule:
    r"""Linear warm-up of the learning rate, from the rate of one worker to that of all workers.

    .. math:: \eta_t = \eta(t) \Big(\frac{1}{n} + \Big(1 - \frac{1}{n}\Big)
              \min\Big(\frac{t}{T}, 1\Big)\Big)

    with :math:`n` workers and :math:`T` steps. A batch that is :math:`n` times as large allows a
    learning rate that is :math:`n` times as high, but not from the start. Nothing is sent.

    Args:
      learning_rate: :math:`\eta`, the rate for all workers, after the warm-up: a number or a
        schedule.
      steps: :math:`T`, a Python int; five epochs in the paper.
      workers: :math:`n`, a Python int.

    Returns:
      A schedule for the optimizer after the aggregator.

    Raises:
      ValueError: If `steps` or `workers` is not a positive Python int.

    Example:
      >>> from jaxcomm import warmup_schedule
      >>> schedule = warmup_schedule(0.8, steps=4, workers=8)
      >>> [round(float(schedule(step)), 3) for step in (0, 2, 4, 100)]
      [0.1, 0.45, 0.8, 0.8]

    References:
      Goyal et al., `Accurate, Large Minibatch SGD <https://arxiv.org/abs/1706.02677>`_, 2017.
    """
    after = learning_rate if callable(learning_rate) else optax.constant_schedule(learning_rate)
    part = optax.linear_schedule(1 / workers, 1.0, steps)
    return lambda count: part(count) * after(count)
