"""Parameter servers: asynchronous, and synchronous with backup workers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm._contract import Codec, PyTree
from jaxcomm._require import Natural, checked
from jaxcomm.synchronization._trees import (
    chosen,
    narrow,
    plus,
    renewed,
    row,
    rows_of,
    scaled,
    wide,
    with_row,
)
from jaxcomm.synchronization._windows import InFlight
from jaxcomm.synchronization.events._engine import Event, Policy, Steps, Task, Work
from jaxcomm.synchronization.events._messages import Sent, bytes_of, messages, sent


class ServerState(NamedTuple):
    """The state of a server."""

    params: PyTree
    optimizer: Any
    shared: Any  # leaves [workers, ...], what the owner keeps of the codec's memory of each worker
    present: jax.Array  # bool[workers]
    dropped: jax.Array  # int32[], the gradients that were too stale


class Reader(NamedTuple):
    """The memory of a worker."""

    read: PyTree  # the parameters at which it computes
    memory: Any  # of the codec


def inverse_staleness(staleness: jax.Array) -> jax.Array:
    r"""The weight of a gradient in staleness-aware asynchronous SGD.

    .. math:: w(\tau) = \frac{1}{\max(\tau, 1)}

    Args:
      staleness: :math:`\tau`, int32[], the updates of the server since the worker read from it.

    Returns:
      float32[].

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization.events import inverse_staleness
      >>> print(inverse_staleness(jnp.int32(4)))
      0.25

    References:
      Zhang et al., `Staleness-aware Async-SGD for Distributed Deep Learning
      <https://arxiv.org/abs/1511.05950>`_, 2016.
    """
    return 1 / jnp.maximum(staleness, 1).astype(jnp.float32)


@checked
def parameter_server(
    tx: optax.GradientTransformation,
    *,
    weight: Callable[[jax.Array], jax.Array] | None = None,
    codec: Codec | None = None,
    most_stale: Natural | None = None,
) -> Policy:
    r"""Asynchronous SGD (ASP): no worker waits, and gradients are stale.

    .. math:: x^{t+1} = x^t + \mathrm{tx}\big(w(\tau)\, g_i(x^{t - \tau})\big)

    Worker i has read the parameters :math:`\tau` updates ago. With one worker this is SGD. Each
    gradient is one message to the server, encoded by `codec`; the reply has the parameters.

    Args:
      tx: The optimizer of the server.
      weight: :math:`w`, a function from the staleness, int32[], to a float32[], such as
        :func:`inverse_staleness`. By default 1.
      codec: Encodes the gradients, leaf by leaf. By default they are sent exactly. Its memory, such
        as a residual, belongs to the worker.
      most_stale: The largest :math:`\tau` of a gradient that is used; one that is staler is dropped
        and counted. By default there is no bound.

    Returns:
      A policy, for :func:`event_loop`. Each worker keeps the parameters that it has read. The state
      counts `dropped` gradients.

    Raises:
      ValueError: If `tx` is not an optax transformation, or `codec` is not a codec.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import events
      >>> plain = events.parameter_server(optax.sgd(0.1))
      >>> aware = events.parameter_server(optax.sgd(0.1), weight=events.inverse_staleness)

    References:
      Zhang et al., `Staleness-aware Async-SGD for Distributed Deep Learning
      <https://arxiv.org/abs/1511.05950>`_, 2016.
      Niu et al., `Hogwild! <https://arxiv.org/abs/1106.5730>`_, 2011.

    Differs from Hogwild: an update is atomic. There, workers of one machine write coordinates
    without a lock, and may read half of an update.
    """
    upload = messages(codec)

    def init(params: PyTree, workers: int) -> ServerState:
        return ServerState(
            params=params,
            optimizer=tx.init(params),
            shared=rows_of(upload.kept(upload.init(params)), workers),
            present=jnp.ones(workers, bool),
            dropped=jnp.zeros((), jnp.int32),
        )

    def steps(work: Work) -> Steps:
        def step(own: Reader, view: PyTree, task: Task) -> tuple[jax.Array, PyTree, Reader]:
            loss, gradient = work(own.read, task)
            message, memory = upload.encode(own.memory, task.key, gradient)
            return loss, message, own._replace(memory=memory)

        return step

    def finish(
        state: ServerState, event: Event, message: PyTree
    ) -> tuple[ServerState, PyTree, Sent]:
        shared = row(state.shared, event.worker)
        gradient, shared = upload.decode(shared, event.key, message, state.params)
        if weight is not None:
            gradient = scaled(gradient, weight(event.staleness))
        updates, optimizer = tx.update(gradient, state.optimizer, state.params)
        params, dropped = optax.apply_updates(state.params, updates), state.dropped
        if most_stale is not None:
            late = event.staleness > most_stale
            params = chosen(late, state.params, params)
            optimizer = chosen(late, state.optimizer, optimizer)
            dropped = dropped + late.astype(jnp.int32)
        after = state._replace(
            params=params,
            optimizer=optimizer,
            shared=with_row(state.shared, event.worker, shared),
            dropped=dropped,
        )
        return after, params, sent(1, bytes_of(message), 1, bytes_of(params))

    def attend(state: ServerState, present: jax.Array, seconds: jax.Array) -> ServerState:
        fresh = upload.kept(upload.init(state.params))
        shared = renewed(state.shared, present & ~state.present, fresh)
        return state._replace(shared=shared, present=present)

    return Policy(
        init=init,
        view=lambda state, worker: (),
        steps=steps,
        finish=finish,
        model=lambda state: state.params,
        join=lambda params, workers: Reader(params, upload.init(params)),
        receive=lambda own, reply: own._replace(read=reply),
        attend=attend,
        move=lambda state, change: state._replace(params=plus(state.params, change)),
    )


class StepState(NamedTuple):
    """The state of a step that waits for some of the workers."""

    params: PyTree
    optimizer: Any
    total: PyTree  # the sum of the gradients that arrived in this step
    arrived: jax.Array  # int32[], their number
    step: jax.Array  # int32[]
    next_step: jax.Array  # int32[workers], of the gradient that a worker computes, or waits for
    present: jax.Array  # bool[workers]
    dropped: jax.Array  # int32[], the gradients of earlier steps that arrived


def bulk_synchronous(tx: optax.GradientTransformation) -> Policy:
    r"""Synchronous SGD: a step waits for the gradients of all workers.

    .. math:: x \gets x + \mathrm{tx}\Big(\frac{1}{n} \sum_i g_i(x)\Big)

    Each gradient is one message to the server, and each worker receives the new parameters. The
    clock is that of :func:`jaxcomm.synchronization.windows` with
    :func:`jaxcomm.synchronization.all_workers`.

    Args:
      tx: The optimizer of the server.

    Returns:
      A policy, for :func:`event_loop`. It has no more state than the optimizer and one sum.

    Raises:
      ValueError: If `tx` is not an optax transformation.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxcomm.synchronization import deterministic, events
      >>> def work(x, event):
      ...     return jax.value_and_grad(lambda x: 0.5 * (x - event.worker.astype(x.dtype)) ** 2)(
      ...         x
      ...     )
      >>> loop = events.event_loop(
      ...     events.bulk_synchronous(optax.sgd(1.0)), work, deterministic([1.0, 3.0]), workers=2
      ... )
      >>> progress, records = loop.run(loop.start(jnp.float32(8.0)), 4)
      >>> print(loop.model(progress), records.seconds)
      0.5 [1. 3. 4. 6.]

    References:
      Chen et al., `Revisiting Distributed Synchronous SGD <https://arxiv.org/abs/1604.00981>`_,
      2016.
    """
    return backup_workers(tx, 0)


@checked
def backup_workers(
    tx: optax.GradientTransformation, backups: Natural, *, in_flight: InFlight = "finish_late"
) -> Policy:
    r"""Synchronous SGD with b backup workers: a step takes the first n of n + b gradients.

    .. math:: x \gets x + \mathrm{tx}\Big(\frac{1}{n} \sum_{i \in F} g_i(x)\Big), \qquad |F| = n

    A gradient that arrives after its step has ended is dropped. If fewer than n workers are left, a
    step takes the gradients of all of them. The gradients are those of the
    fastest workers: if speed depends on the data, the mean is biased. A worker sends each gradient
    that it finishes, the dropped ones too, and receives the parameters.

    Args:
      tx: The optimizer of the server.
      backups: b, at least 0 and less than the number of workers, n + b.
      in_flight: What a worker does when a step ends without it. `"finish_late"` finishes the
        gradient, which is dropped. `"abort"` restarts at the new parameters at once, and sends
        nothing; the seconds of a step are then the n-th of n + b times.

    Returns:
      A policy, for :func:`event_loop`. Its state counts `dropped` gradients.

    Raises:
      ValueError: If `backups` is negative, `in_flight` has another value, or `tx` is not an optax
        transformation; when started, if `backups` is not less than the number of workers.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxcomm.synchronization import deterministic, events
      >>> def work(x, event):
      ...     return jax.value_and_grad(lambda x: 0.5 * x**2)(x)
      >>> loop = events.event_loop(
      ...     events.backup_workers(optax.sgd(0.5), 1),
      ...     work,
      ...     deterministic([1.0, 1.0, 3.5]),
      ...     workers=3,
      ... )
      >>> progress, records = loop.run(loop.start(jnp.float32(8.0)), 7)
      >>> print(loop.model(progress), records.worker, progress.policy.dropped)
      1.0 [0 1 0 1 0 1 2] 1

    References:
      Chen et al., `Revisiting Distributed Synchronous SGD <https://arxiv.org/abs/1604.00981>`_,
      2016.
    """
    aborts = in_flight == "abort"

    def init(params: PyTree, workers: int) -> StepState:
        if backups >= workers:
            raise ValueError(f"`backups`={backups} must be less than {workers} workers.")
        zero = jnp.zeros((), jnp.int32)
        return StepState(
            params=params,
            optimizer=tx.init(params),
            total=jax.tree.map(jnp.zeros_like, wide(params)),
            arrived=zero,
            step=zero,
            next_step=jnp.zeros(workers, jnp.int32),
            present=jnp.ones(workers, bool),
            dropped=zero,
        )

    def ended(state: StepState) -> StepState:
        """The state after the step, if enough gradients have arrived."""
        wanted = jnp.minimum(
            len(state.next_step) - backups, jnp.sum(state.present, dtype=jnp.int32)
        )

        def step() -> tuple[PyTree, Any, PyTree]:
            mean = jax.tree.map(lambda x: x * (1 / state.arrived.astype(x.dtype)), state.total)
            updates, optimizer = tx.update(
                narrow(mean, state.params), state.optimizer, state.params
            )
            zeros = jax.tree.map(jnp.zeros_like, state.total)
            return optax.apply_updates(state.params, updates), optimizer, zeros

        ends = (state.arrived >= wanted) & (state.arrived > 0)
        params, optimizer, total = lax.cond(
            ends, step, lambda: (state.params, state.optimizer, state.total)
        )
        number = state.step + ends.astype(jnp.int32)
        next_step = jnp.where(ends, number, state.next_step) if aborts else state.next_step
        return state._replace(
            params=params,
            optimizer=optimizer,
            total=total,
            arrived=jnp.where(ends, 0, state.arrived),
            step=number,
            next_step=next_step,
        )

    def finish(state: StepState, event: Event, gradient: PyTree) -> tuple[StepState, PyTree, Sent]:
        fresh = state.next_step[event.worker] == state.step
        mine = jnp.where(fresh, state.step + 1, state.step)
        after = state._replace(
            total=chosen(fresh, plus(state.total, gradient), state.total),
            arrived=state.arrived + fresh.astype(jnp.int32),
            next_step=state.next_step.at[event.worker].set(mine),
            dropped=state.dropped + (~fresh).astype(jnp.int32),
        )
        size = bytes_of(state.params)
        return ended(after), (), sent(1, size, 1, size)

    def attend(state: StepState, present: jax.Array, seconds: jax.Array) -> StepState:
        joins = present & ~state.present
        next_step = jnp.where(joins, state.step, state.next_step)
        return ended(state._replace(present=present, next_step=next_step))

    def begins(state: StepState, idle: jax.Array) -> jax.Array:
        if aborts:
            return jnp.full(idle.shape, state.arrived == 0)
        return idle & (state.next_step <= state.step)

    return Policy(
        init=init,
        view=lambda state, worker: state.params,
        finish=finish,
        model=lambda state: state.params,
        begins=begins,
        attend=attend,
        restarts=aborts,
        move=lambda state, change: state._replace(params=plus(state.params, change)),
    )
