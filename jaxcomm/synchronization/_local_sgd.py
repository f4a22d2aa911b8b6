"""Workers that step by themselves and meet now and then: local SGD, SlowMo, DiLoCo."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._base import AxisName, PerWorker, PyTree
from jaxcomm._per_worker import per_worker
from jaxcomm._when import run_when
from jaxcomm.aggregation import mean
from jaxcomm.synchronization._meeting import (
    first_anchor,
    is_here,
    meet,
    moved_from,
    no_steps,
    require_params,
    take_step,
    way_to,
)
from jaxcomm.synchronization._require import require_int, require_transformation
from jaxcomm.synchronization._wide import wide

Period: TypeAlias = int | Callable[[jax.Array], jax.Array | int]
"""Steps from one exchange to the next; or a function of the steps taken, int32[]."""


class LocalState(NamedTuple):
    """The state between exchanges, equal on all workers but for what the aggregator marks."""

    step: jax.Array  # int32[], steps so far
    since: jax.Array  # int32[], since the last exchange
    anchor: PyTree  # the parameters after the last exchange, in float32 at least
    aggregator: Any
    outer: Any
    done: PerWorker  # each worker's steps since
    info: dict[str, jax.Array]  # float32[], steps that were left out before the last exchange


def period_of(period: Period) -> Callable[[jax.Array], jax.Array]:
    """From the steps taken to the period, int32[]."""
    if callable(period):
        return lambda step: jnp.asarray(period(step), jnp.int32)
    if not isinstance(period, int) or isinstance(period, bool) or period < 1:
        raise ValueError(
            f"`period` must be a Python int of at least 1 or a schedule, got {period!r}."
        )
    return lambda step: jnp.full((), period, jnp.int32)


def _meet(
    period: Period,
    outer: optax.GradientTransformation,
    aggregator: optax.GradientTransformation | None,
    axis_name: AxisName,
) -> optax.GradientTransformationExtraArgs:
    """Every so many steps the mean of what workers have moved, and a step of `outer` with it."""
    combine = optax.with_extra_args_support(mean(axis_name) if aggregator is None else aggregator)
    step_outside = optax.with_extra_args_support(outer)
    period_at = period_of(period)

    def init_fn(params: PyTree) -> LocalState:
        _axis.require_bound(axis_name)
        anchor, zero = first_anchor(params, axis_name), jnp.zeros((), jnp.int32)
        return LocalState(
            step=zero,
            since=zero,
            anchor=anchor,
            aggregator=combine.init(wide(params)),
            outer=step_outside.init(anchor),
            done=no_steps(axis_name),
            info={"left_out": jnp.zeros((), jnp.float32)},
        )

    def update_fn(
        updates: PyTree,
        state: LocalState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        present: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, LocalState]:
        require_params(params, axis_name)
        here = is_here(present, axis_name)
        updates, done = take_step(params, updates, state.done, weight, axis_name)
        local = state._replace(step=state.step + 1, since=state.since + 1, done=done)

        def exchange() -> tuple[PyTree, LocalState]:
            met = meet(
                combine,
                state.aggregator,
                state.anchor,
                moved_from(state.anchor, params, updates),
                done,
                here=here,
                weighted=weight is not None,
                axis_name=axis_name,
                extra_args=extra_args,
            )
            descent = jax.tree.map(jnp.negative, met.mean)
            change, outside = step_outside.update(descent, state.outer, state.anchor, **extra_args)
            anchor = optax.apply_updates(state.anchor, change)
            onward = jax.tree.map(
                lambda a, u: jnp.where(here, a, u), way_to(anchor, params), updates
            )
            return onward, LocalState(
                step=local.step,
                since=jnp.zeros((), jnp.int32),
                anchor=anchor,
                aggregator=met.aggregator,
                outer=outside,
                done=met.done,
                info={"left_out": state.info["left_out"] + met.left_out},
            )

        due = local.since >= period_at(state.step)
        return run_when(due, exchange, lambda _: (updates, local))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def local_sgd(
    period: Period,
    aggregator: optax.GradientTransformation | None = None,
    *,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""Workers step by themselves, and average every so many steps.

    .. math:: x_i \gets x_i + \Delta_i, \qquad\text{and at every } H \text{-th step}\quad
              a \gets a + \frac{1}{n} \sum_i (x_i - a), \quad x_i \gets a

    with :math:`a` the parameters after the last exchange, from which `aggregator` sends how far
    workers have moved: any aggregator will do, compressed or with feedback. Between exchanges
    nothing is sent, and two float32 at them besides what the aggregator does. Optax adds updates,
    so that workers agree but for the rounding of that one sum; :math:`a`, from which the next
    exchange counts, is the same on all bit for bit. It is of float32 at least: parameters of 16
    bits are its roundings, so that what is less than one of theirs adds up over exchanges.

    A step that would not be finite, of a NaN batch, is left out by its worker alone, which adds its
    other steps to the mean and takes it like all. The state's field `info` counts such steps, as
    `left_out`, at each exchange.

    Args:
      period: H, an int of at least 1, or a schedule: a function of the steps taken, int32[].
      aggregator: Forms the mean. Default: the exact one.
      axis_name: The mesh axis, or axes, that number the workers.

    Returns:
      A transformation to place *after* the optimizer, on parameters that differ by worker
      (:func:`jaxcomm.replicate`). An optimizer that keeps state is marked with
      :func:`jaxcomm.per_worker`; its state stays each worker's own. `update(..., weight=w)`, at
      every step or at none, makes the mean one weighted by the sum of a worker's weights since the
      last exchange, and a step of weight 0 is not taken; so counts of windows weigh.
      `update(..., present=mask)`, a bool a worker that all know, takes workers out of an exchange:
      they add nothing to it, go on by themselves, and are averaged as they are at the next.

    Raises:
      ValueError: If `period` is no positive int or schedule; in `update`, if parameters do not
        differ by worker, `weight` is no scalar, or `present` not one bool a worker.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> from jaxcomm.synchronization import local_sgd
      >>> tx = optax.chain(optax.sgd(0.5), local_sgd(period=2))
      >>> params = jaxcomm.replicate(jnp.float32(0), 2)
      >>> state = jaxcomm.init(tx, params, 2)
      >>> step = jaxcomm.simulate(lambda w, x: jnp.mean((w - x) ** 2), tx, 2)
      >>> for _ in range(2):
      ...     params, state, _ = step(params, state, jnp.array([1.0, 3.0]))
      ...     print(params.per_worker["data"])
      [1. 3.]
      [2. 2.]

    References:
      Stich, `Local SGD Converges Fast and Communicates Little <https://arxiv.org/abs/1805.09767>`_,
      2018. Lin et al., `Don't Use Large Mini-Batches, Use Local SGD
      <https://arxiv.org/abs/1808.07217>`_, 2018.
    """
    return _meet(period, optax.sgd(1.0), aggregator, axis_name)


def post_local(start: int, period: int) -> Callable[[jax.Array], jax.Array]:
    """The schedule of post-local SGD: an exchange in every step at first, and then every so many.

    Args:
      start: Steps before local ones begin, at least 0.
      period: Steps from one exchange to the next from then on.

    Returns:
      A `period` for :func:`local_sgd`.

    Raises:
      ValueError: If `start` is negative or `period` no positive int.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import post_local
      >>> print(post_local(start=2, period=4)(jnp.arange(4)))
      [1 1 4 4]
    """
    period_of(period)
    require_int(start, "start", least=0)
    return lambda step: jnp.where(step < start, 1, period)


def slowmo(
    period: Period,
    *,
    slow_rate: float = 1.0,
    momentum: float = 0.5,
    learning_rate: optax.ScalarOrSchedule = 1.0,
    aggregator: optax.GradientTransformation | None = None,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""Local SGD with a slow momentum over exchanges.

    .. math:: u \gets \beta u + \frac{1}{\gamma} (a - \bar x), \qquad
              a \gets a - \alpha \gamma u, \qquad x_i \gets a

    with :math:`\bar x` the mean of workers and :math:`a` the parameters after the last exchange.
    Sends what :func:`local_sgd` does.

    Args:
      period: As for :func:`local_sgd`.
      slow_rate: :math:`\alpha`.
      momentum: :math:`\beta` in [0, 1). With 0 and `slow_rate=1` this is :func:`local_sgd`.
      learning_rate: :math:`\gamma` of the optimizer inside, which `u` is to be independent of: a
        number, or a schedule of the number of exchanges.
      aggregator: As for :func:`local_sgd`.
      axis_name: The mesh axis, or axes, that number the workers.

    Returns:
      A transformation like that of :func:`local_sgd`. Buffers of the optimizer inside are kept.

    Raises:
      ValueError: As :func:`local_sgd` does, or if `momentum` is out of range.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import slowmo
      >>> tx = optax.chain(optax.sgd(0.1), slowmo(period=12, momentum=0.5, learning_rate=0.1))

    References:
      Wang et al., `SlowMo <https://arxiv.org/abs/1910.00643>`_, 2019.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"`momentum` must be in [0, 1), got {momentum!r}.")
    rate = learning_rate if callable(learning_rate) else lambda count: learning_rate
    slow = optax.chain(
        optax.scale_by_schedule(lambda count: 1 / rate(count)),
        optax.trace(momentum),
        optax.scale_by_schedule(lambda count: -slow_rate * rate(count)),
    )
    return _meet(period, slow, aggregator, axis_name)


def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    period: Period,
    aggregator: optax.GradientTransformation | None = None,
    *,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""Two optimizers: one inside, on each worker by itself, and one outside, of what they moved.

    .. math:: x_i \gets x_i + \mathrm{inner}(g_i), \qquad\text{and at every } H \text{-th step}\quad
              a \gets a + \mathrm{outer}\Big(\frac{1}{n} \sum_i (a - x_i)\Big), \quad x_i \gets a

    The state of `inner` is each worker's own, that of `outer` common. Between exchanges nothing is
    sent; what `aggregator` sends is, at them. Steps that are not finite are left out, and 16 bits
    averaged, as :func:`local_sgd` does.

    Args:
      inner: Any optax optimizer, such as `optax.adamw`.
      outer: Any, such as `optax.sgd(0.7, momentum=0.9, nesterov=True)`; with `optax.sgd(1.0)` this
        is :func:`local_sgd`.
      period: As for :func:`local_sgd`.
      aggregator: As for :func:`local_sgd`: it is given how far workers have moved.
      axis_name: The mesh axis, or axes, that number the workers.

    Returns:
      A whole transformation, on parameters that differ by worker (:func:`jaxcomm.replicate`). It
      takes `weight` and `present` as :func:`local_sgd` does.

    Raises:
      ValueError: As :func:`local_sgd` does, or if an optimizer is no optax transformation.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import diloco
      >>> outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
      >>> tx = diloco(optax.sgd(0.1, momentum=0.9), outer, period=50)

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023.
    """
    require_transformation(inner, "inner")
    require_transformation(outer, "outer")
    return optax.chain(per_worker(inner, axis_name), _meet(period, outer, aggregator, axis_name))
