"""DES-LOC: local steps whose parameters and moments are averaged in periods of their own."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PerWorker, PyTree
from jaxcomm._mesh import collective_cond
from jaxcomm._noise import following
from jaxcomm._require import Positive, checked
from jaxcomm._workers import per_worker
from jaxcomm.aggregation import mean
from jaxcomm.synchronization._averaging_round import (
    apply_finite_step,
    mean_of_floats,
    no_steps,
    takes_part,
)
from jaxcomm.synchronization._exchange import Period
from jaxcomm.synchronization._local_sgd import local_sgd


class MomentsState(NamedTuple):
    """The state of an optimizer whose moments are averaged."""

    step: jax.Array  # int32[], steps so far
    optimizer: PerWorker
    done: dict[str, PerWorker]  # of each field, each worker's steps since its last average


def _places(state: PyTree) -> dict[str, list[int]]:
    """Of each named field, which leaves are its floating-point arrays."""
    found: dict[str, list[int]] = {}
    for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        for key in path if jnp.issubdtype(x.dtype, jnp.floating) else ():
            if isinstance(key, jax.tree_util.GetAttrKey):
                found.setdefault(key.name, []).append(i)
    return found


def averaged_moments(
    inner: optax.GradientTransformation, periods: Mapping[str, int], axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of each worker, with means of its fields over the steps that were applied."""
    own, exact = per_worker(inner, axis_name=axis_name), mean(axis_name)

    def averaged(due: jax.Array, participates: jax.Array, kept: tuple[Any, Any]) -> tuple[Any, Any]:
        floats, done = kept

        def exchange() -> Any:
            steps = _axis.local_params(jnp.where(participates, done.weight, 0), axis_name=axis_name)
            with jax.named_scope("weight"):
                total = lax.psum(steps, axis_name)
            means, taken = mean_of_floats(exact, floats, steps, total, participates)
            return means, jax.tree.map(lambda x: jnp.where(taken, 0, x), done)

        return collective_cond(due, exchange, lambda _: kept)

    def init_fn(params: PyTree) -> MomentsState:
        optimizer = own.init(params)
        named = _places(_axis.own(optimizer, axis_name))
        if missing := [field for field in periods if field not in named]:
            raise ValueError(
                f"The state of `inner` has no floating-point field {missing[0]!r}, of {[*named]}."
            )
        done = {field: no_steps(params, axis_name) for field in periods}
        return MomentsState(jnp.zeros((), jnp.int32), optimizer, done)

    def update_fn(
        updates: PyTree,
        state: MomentsState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        present: jax.Array | None = None,
        flush: jax.Array | bool = False,
        **extra_args: Any,
    ) -> tuple[PyTree, MomentsState]:
        extra = extra_args if weight is None else {**extra_args, "weight": weight}
        updates, marked = own.update(updates, state.optimizer, params, **extra)
        step, participates = following(state.step), takes_part(present, axis_name)
        optimizer = _axis.own(marked, axis_name)
        leaves, treedef = jax.tree.flatten(optimizer)
        after, named = dict(state.done), _places(optimizer)
        for field, period in periods.items():
            _, after[field] = apply_finite_step(params, updates, after[field], weight, axis_name)
            kept = [leaves[i] for i in named[field]], _axis.own(after[field], axis_name)
            due = (step % period == 0) | jnp.asarray(flush)
            floats, done = averaged(due, participates, kept)
            after[field] = _axis.marked(done, axis_name)
            for i, x in zip(named[field], floats, strict=True):
                leaves[i] = x
        marked = _axis.marked(jax.tree.unflatten(treedef, leaves), axis_name)
        return updates, MomentsState(step, marked, after)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@checked
def des_loc(
    inner: optax.GradientTransformation,
    period: Period,
    periods: Mapping[str, Positive],
    *,
    aggregator: optax.GradientTransformation | None = None,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""Local steps that average parameters often, and each moment in a period of its own (DES-LOC).

    .. math:: x_i \gets \frac{1}{n} \sum_j x_j \text{ at every } K_x \text{-th step}, \qquad
              u_i \gets \frac{1}{n} \sum_j u_j \text{ at every } K_u \text{-th}, \qquad
              v_i \gets \frac{1}{n} \sum_j v_j \text{ at every } K_v \text{-th}

    An average of d coordinates sends :math:`2 (n - 1) / n` times `4 d` bytes and two float32, so
    with :math:`K_u = 3 K_x` and :math:`K_v = 6 K_x` half of what Local Adam sends. Non-finite steps
    are skipped, and 16-bit parameters are averaged, as in
    :func:`jaxcomm.synchronization.local_sgd`. Averages of moments are weighted as there, by the
    steps since the last one.

    Args:
      inner: Any optax optimizer.
      period: :math:`K_x`, as for :func:`jaxcomm.synchronization.local_sgd`.
      periods: The number of steps between averages of each floating-point field of the state of
        `inner`, such as `{"mu": 96, "nu": 96}` for Adam. Fields that are not named stay those of
        each worker.
      aggregator: As for :func:`jaxcomm.synchronization.local_sgd`; moments are averaged exactly.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      A complete optimizer, for parameters that differ by worker (:func:`jaxcomm.replicate`). If all
      fields have the period of the parameters, it is :func:`jaxcomm.synchronization.pr_sgd`.

    Raises:
      ValueError: As :func:`jaxcomm.synchronization.local_sgd` does; if a period is not a positive
        int; or, in `init`, if the state has no such field.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import des_loc
      >>> tx = des_loc(optax.adam(0.001), 32, {"mu": 96, "nu": 96})

    References:
      Iacob et al., `DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation
      Models <https://arxiv.org/abs/2505.22549>`_, 2025.

    The paper has :math:`K_v = 2 K_u`. Where all gradients of a worker have been 0, as of a dead
    unit, so is its :math:`v_i`, and an average of :math:`u` alone makes it step by :math:`\bar u /
    \epsilon`. With Adam's :math:`\epsilon = 10^{-8}` this made a small network diverge, and
    :math:`K_v = K_u` or :math:`10^{-4}` did not.

    Differs from the paper: averages follow a step, where the paper's precede the next one, which is
    the same. Gradients are not clipped: place a clip in `inner`.
    """
    return optax.chain(
        averaged_moments(inner, periods, axis_name),
        local_sgd(period, aggregator=aggregator, axis_name=axis_name),
    )
