"""Decoupled DiLoCo: learners on their own clocks, and a server that merges what has arrived."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm._contract import Codec, PyTree
from jaxcomm._require import AtLeastZero, Natural, Positive, checked
from jaxcomm.synchronization._averaging_round import outer_step
from jaxcomm.synchronization._trees import (
    chosen,
    empty,
    minus,
    narrow,
    plus,
    renewed,
    row,
    rows_of,
    scaled,
    wide,
    with_row,
)
from jaxcomm.synchronization.events._engine import Event, Policy, Steps, Task, Work
from jaxcomm.synchronization.events._messages import Sent, bytes_of, messages, sent


class DecoupledState(NamedTuple):
    """The state of the server."""

    anchor: PyTree  # the merged parameters, in float32 at least
    outer: Any
    merges: jax.Array  # int32[]
    total: PyTree  # the weighted sum of the displacements since the last merge
    weight: jax.Array  # float32[], the sum of their weights
    arrived: jax.Array  # bool[workers], whose displacement is in the sum
    deadline: jax.Array  # float32[], seconds, when the grace window ends; infinite without a quorum
    heard: jax.Array  # int32[workers], the merges that each worker has heard of
    shared: Any  # leaves [workers, ...], what the owner keeps of the codec's memory of each worker
    present: jax.Array  # bool[workers]
    dropped: jax.Array  # int32[], the displacements that were too stale
    dtypes: PyTree  # leaves [0], of the dtypes of the parameters


class Merged(NamedTuple):
    """What a learner hears of the server."""

    anchor: PyTree
    merges: jax.Array  # int32[]


class Learner(NamedTuple):
    """The memory of a learner."""

    params: PyTree  # in float32 at least
    base: PyTree  # from which it measures its displacement
    inner: Any
    aligned: jax.Array  # int32[], the merges that it has received
    began: jax.Array  # int32[], those that it had received when it last sent
    memory: Any  # of the codec
    dtypes: PyTree  # leaves [0], of the dtypes of the parameters


class Displacement(NamedTuple):
    """The message of a learner."""

    payload: PyTree
    began: PyTree  # int32[], the merges that it had received when it last sent; () if unused


@checked
def decoupled_diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    period: Positive,
    *,
    quorum: Positive,
    grace: AtLeastZero = 0.0,
    tokens: Sequence[float] | None = None,
    codec: Codec | None = None,
    most_stale: Natural | None = None,
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
    merged exactly once. Learners that have failed or are slow delay no merge. If fewer than
    `quorum` are left, all of them are one.

    A displacement, encoded by `codec`, is one message; an anchor with its number is another.

    Args:
      inner: The optimizer of each learner.
      outer: The optimizer of the server, such as `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
      period: :math:`H`, the inner steps between two displacements of a learner.
      quorum: The least number of learners in a merge.
      grace: The seconds that the server waits for more, from the quorum on.
      tokens: The tokens of one inner step of each learner, above 0. By default equal.
      codec: Encodes the displacements, leaf by leaf. By default they are sent exactly. Its memory,
        such as a residual, belongs to the learner.
      most_stale: The most merges between the anchor from which a displacement is measured and the
        one that it would be in; a staler displacement is dropped and counted. By default there is
        no bound.

    Returns:
      A policy, for :func:`event_loop`. Its model is the anchor; a merge takes effect with the first
      event after the grace window. Its state counts `dropped` displacements.

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

    upload = messages(codec)

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
            heard=jnp.zeros(workers, jnp.int32),
            shared=rows_of(upload.kept(upload.init(anchor)), workers),
            present=jnp.ones(workers, bool),
            dropped=jnp.zeros((), jnp.int32),
            dtypes=empty(params),
        )

    def join(params: PyTree, workers: int) -> Learner:
        zero = jnp.zeros((), jnp.int32)
        return Learner(
            params=wide(params),
            base=wide(params),
            inner=inner.init(params),
            aligned=zero,
            began=zero,
            memory=upload.init(wide(params)),
            dtypes=empty(params),
        )

    def talks(number: jax.Array) -> jax.Array:
        return number % period == period - 1

    def steps(work: Work) -> Steps:
        def step(own: Learner, view: Merged, task: Task) -> tuple[jax.Array, PyTree, Learner]:
            point = narrow(own.params, own.dtypes)
            loss, gradient = work(point, task)
            updates, inner_state = inner.update(gradient, own.inner, point)
            x = plus(own.params, updates)
            behind = own.aligned < view.merges
            unsent = minus(x, own.base)
            own = own._replace(
                params=chosen(behind, plus(view.anchor, unsent), x),
                base=chosen(behind, view.anchor, own.base),
                inner=inner_state,
                aligned=jnp.maximum(own.aligned, view.merges),
            )

            def send() -> tuple[Displacement, Learner]:
                payload, memory = upload.encode(own.memory, task.key, unsent)
                began = () if most_stale is None else own.began
                return Displacement(payload, began), own._replace(
                    base=own.params, began=own.aligned, memory=memory
                )

            def nothing() -> tuple[Displacement, Learner]:
                message, _ = jax.eval_shape(send)
                return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), message), own

            return loss, *lax.cond(talks(task.number), send, nothing)

        return step

    def merged_if(due: jax.Array, state: DecoupledState) -> DecoupledState:
        """The state after a merge, if it is due."""
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

    def after_arrival(state: DecoupledState, seconds: jax.Array) -> DecoupledState:
        """The state whose grace window begins with the quorum, and ends with the last learner."""
        learners = jnp.sum(state.arrived, dtype=jnp.int32)
        least = jnp.clip(jnp.sum(state.present, dtype=jnp.int32), 1, quorum)
        opens = (learners >= least) & jnp.isinf(state.deadline)
        deadline = jnp.where(opens, seconds + jnp.float32(grace), state.deadline)
        everyone = jnp.all(state.arrived | ~state.present) & (learners > 0)
        return merged_if(everyone, state._replace(deadline=deadline))

    def finish(
        state: DecoupledState, event: Event, message: Displacement
    ) -> tuple[DecoupledState, PyTree, Sent]:
        worker = event.worker
        shared = row(state.shared, worker)
        moved, shared = upload.decode(shared, event.key, message.payload, state.anchor)
        each = 1.0 if tokens is None else jnp.asarray(tokens, jnp.float32)[worker]
        late = False if most_stale is None else state.merges - message.began > most_stale
        weight = jnp.where(late, 0, period * jnp.square(jnp.float32(each)))
        after = state._replace(
            total=plus(state.total, scaled(moved, weight)),
            weight=state.weight + weight,
            arrived=state.arrived.at[worker].set(state.arrived[worker] | ~jnp.asarray(late)),
            shared=with_row(state.shared, worker, shared),
            dropped=state.dropped + jnp.asarray(late, jnp.int32),
        )
        return after_arrival(after, event.seconds), (), sent(1, bytes_of(message))

    def hears(state: DecoupledState, worker: jax.Array) -> tuple[DecoupledState, Sent]:
        behind = state.heard[worker] < state.merges
        size = bytes_of(view(state, worker))
        heard = state.heard.at[worker].set(state.merges)
        return state._replace(heard=heard), sent(0, 0, behind, jnp.where(behind, size, 0))

    def attend(state: DecoupledState, present: jax.Array, seconds: jax.Array) -> DecoupledState:
        joins = present & ~state.present
        state = state._replace(
            present=present,
            heard=jnp.where(joins, state.merges, state.heard),
            shared=renewed(state.shared, joins, upload.kept(upload.init(state.anchor))),
        )
        return after_arrival(state, seconds)

    def view(state: DecoupledState, worker: jax.Array) -> Merged:
        return Merged(state.anchor, state.merges)

    return Policy(
        init=init,
        view=view,
        steps=steps,
        finish=finish,
        model=lambda state: narrow(state.anchor, state.dtypes),
        join=join,
        talks=talks,
        hears=hears,
        tick=lambda state, seconds: merged_if(seconds > state.deadline, state),
        due=lambda state: state.deadline,
        attend=attend,
        move=lambda state, change: state._replace(
            anchor=plus(state.anchor, change), merges=state.merges + 1
        ),
    )
