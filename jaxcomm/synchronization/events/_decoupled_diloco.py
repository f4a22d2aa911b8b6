"""Decoupled DiLoCo: learners on their own clocks, and a server that merges what has arrived."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm._contract import PyTree
from jaxcomm._require import AtLeastZero, Positive, checked
from jaxcomm.synchronization._averaging_round import outer_step
from jaxcomm.synchronization._trees import (
    chosen,
    empty,
    minus,
    narrow,
    plus,
    row,
    rows_of,
    scaled,
    wide,
    with_row,
)
from jaxcomm.synchronization.events._engine import Event, Policy, Sent, bytes_of, sent


class DecoupledState(NamedTuple):
    """The state of the server and of the learners."""

    anchor: PyTree  # the merged parameters, in float32 at least
    outer: Any
    merges: jax.Array  # int32[]
    total: PyTree  # the weighted sum of the displacements since the last merge
    weight: jax.Array  # float32[], the sum of their weights
    arrived: jax.Array  # bool[workers], whose displacement is in the sum
    deadline: jax.Array  # float32[], seconds, when the grace window ends; infinite without a quorum
    params: PyTree  # leaves [workers, ...], in float32 at least
    base: PyTree  # leaves [workers, ...], from which each worker measures its displacement
    inner: Any  # leaves [workers, ...]
    aligned: jax.Array  # int32[workers], the merges that each worker has received
    dtypes: PyTree  # leaves [0], of the dtypes of the parameters


@checked
def decoupled_diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    period: Positive,
    *,
    quorum: Positive,
    grace: AtLeastZero = 0.0,
    tokens: Sequence[float] | None = None,
) -> Policy:
    r"""DiLoCo whose learners never wait: a quorum of them is merged after a grace window.

    .. math:: a \gets a + \mathrm{outer}\Big(\frac{\sum_{i \in M} w_i (b_i - x_i)}
              {\sum_{i \in M} w_i}\Big), \qquad w_i = c_i \cdot \frac{c_i}{H}

    A learner takes inner steps. After every `period` :math:`H` of them it sends its displacement
    :math:`x_i - b_i` since the last one, sets :math:`b_i = x_i`, and goes on. When `quorum`
    learners have sent one, the server waits for others for `grace` seconds, or until all have. Then
    it merges all displacements that it has, weighted by their tokens :math:`c_i` times the tokens
    per step. With its next gradient, each learner receives the new anchor, and keeps its unsent
    displacement: :math:`x_i \gets a + (x_i - b_i)`, :math:`b_i \gets a`. So each displacement is
    merged exactly once. Learners that have failed or are slow delay no merge.

    A displacement is one message, an anchor another.

    Args:
      inner: The optimizer of each learner.
      outer: The optimizer of the server, such as `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
      period: :math:`H`, the inner steps between two displacements of a learner.
      quorum: The least number of learners in a merge.
      grace: The seconds that the server waits for more, from the quorum on.
      tokens: The tokens of one inner step of each learner, above 0. By default equal.

    Returns:
      A policy, for :func:`event_loop`. Its model is the anchor; a merge takes effect with the first
      event after the grace window.

    Raises:
      ValueError: If an optimizer is not an optax transformation, `period` or `quorum` is not a
        positive int, or `grace` is negative; when started, if `quorum` is more than the number of
        workers, or `tokens` has another number.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import events
      >>> outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
      >>> policy = events.decoupled_diloco(optax.sgd(0.1), outer, period=10, quorum=6, grace=0.5)

    References:
      Douillard et al., `Decoupled DiLoCo for Resilient Distributed Pre-training
      <https://arxiv.org/abs/2604.21428>`_, 2026.

    Differs from the paper: the parameters are one fragment, and the grace window has a fixed
    length. How a learner receives an anchor is a reconstruction: the full paper was not available.
    """

    def init(params: PyTree, workers: int) -> DecoupledState:
        if quorum > workers:
            raise ValueError(f"`quorum`={quorum} is more than the number of workers, {workers}.")
        if tokens is not None and len(tokens) != workers:
            raise ValueError(f"`tokens` must have {workers} numbers, got {len(tokens)}.")
        anchor = wide(params)
        zero = jnp.zeros((), jnp.float32)
        return DecoupledState(
            anchor=anchor,
            outer=outer.init(anchor),
            merges=jnp.zeros((), jnp.int32),
            total=jax.tree.map(jnp.zeros_like, anchor),
            weight=zero,
            arrived=jnp.zeros(workers, bool),
            deadline=zero + jnp.inf,
            params=rows_of(anchor, workers),
            base=rows_of(anchor, workers),
            inner=rows_of(inner.init(params), workers),
            aligned=jnp.zeros(workers, jnp.int32),
            dtypes=empty(params),
        )

    def merged_if(due: jax.Array, state: DecoupledState) -> DecoupledState:
        """The state after a merge, if it is due; the fields of the learners do not change."""
        mean = scaled(state.total, jnp.where(due, 1 / state.weight, 0))
        anchor, outer_state = outer_step(outer, mean, state.outer, state.anchor)
        return state._replace(
            anchor=chosen(due, anchor, state.anchor),
            outer=chosen(due, outer_state, state.outer),
            merges=state.merges + due.astype(jnp.int32),
            total=chosen(due, jax.tree.map(jnp.zeros_like, state.total), state.total),
            weight=jnp.where(due, 0, state.weight),
            arrived=state.arrived & ~due,
            deadline=jnp.where(due, jnp.inf, state.deadline),
        )

    def finish(
        state: DecoupledState, event: Event, gradient: PyTree
    ) -> tuple[DecoupledState, Sent]:
        worker = event.worker
        x, base = row(state.params, worker), row(state.base, worker)
        updates, inner_state = inner.update(
            gradient, row(state.inner, worker), narrow(x, state.dtypes)
        )
        x = plus(x, updates)
        state = merged_if(event.seconds > state.deadline, state)
        behind = state.aligned[worker] < state.merges
        unsent = minus(x, base)
        x = chosen(behind, plus(state.anchor, unsent), x)
        base = chosen(behind, state.anchor, base)
        sends = event.number % period == period - 1
        each = 1.0 if tokens is None else jnp.asarray(tokens, jnp.float32)[worker]
        weight = jnp.where(sends, period * jnp.square(jnp.float32(each)), 0)
        arrived = state.arrived.at[worker].set(state.arrived[worker] | sends)
        reached = jnp.sum(arrived, dtype=jnp.int32) >= quorum
        opens = sends & reached & jnp.isinf(state.deadline)
        state = state._replace(
            total=plus(state.total, scaled(unsent, weight)),
            weight=state.weight + weight,
            arrived=arrived,
            deadline=jnp.where(opens, event.seconds + jnp.float32(grace), state.deadline),
            params=with_row(state.params, worker, x),
            base=with_row(state.base, worker, chosen(sends, x, base)),
            inner=with_row(state.inner, worker, inner_state),
            aligned=state.aligned.at[worker].set(state.merges),
        )
        state = merged_if(jnp.all(state.arrived), state)
        size = bytes_of(gradient)
        return state, sent(sends, jnp.where(sends, size, 0), behind, jnp.where(behind, size, 0))

    return Policy(
        init=init,
        point=lambda state, event: narrow(row(state.params, event.worker), state.dtypes),
        finish=finish,
        model=lambda state: narrow(state.anchor, state.dtypes),
    )
