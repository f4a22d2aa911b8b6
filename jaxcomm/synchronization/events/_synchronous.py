"""Synchronous SGD on the event engine, with and without backup workers."""

from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm._contract import PyTree
from jaxcomm._require import require_transformation
from jaxcomm.synchronization._require import require_int
from jaxcomm.synchronization._trees import chosen, narrow, plus, scaled, wide
from jaxcomm.synchronization._windows import InFlight
from jaxcomm.synchronization.events._policy import Event, Policy, Sent, bytes_of, sent


class StepState(NamedTuple):
    """The state of a step that waits for some of the workers."""

    params: PyTree
    optimizer: Any
    total: PyTree  # the sum of the gradients that arrived in this step
    arrived: jax.Array  # int32[], their number
    step: jax.Array  # int32[]
    next_step: (
        jax.Array
    )  # int32[workers], the step of the gradient that a worker computes, or waits for
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


def backup_workers(
    tx: optax.GradientTransformation, backups: int, *, in_flight: InFlight = "finish_late"
) -> Policy:
    r"""Synchronous SGD with b backup workers: a step takes the first n of n + b gradients.

    .. math:: x \gets x + \mathrm{tx}\Big(\frac{1}{n} \sum_{i \in F} g_i(x)\Big), \qquad |F| = n

    A gradient that arrives after its step has ended is dropped. The gradients are those of the
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
    require_transformation(tx)
    require_int(backups, "backups", least=0)
    if in_flight not in get_args(InFlight):
        raise ValueError(f"`in_flight` must be one of {get_args(InFlight)}, got {in_flight!r}.")
    aborts = in_flight == "abort"

    def init(params: PyTree, workers: int) -> StepState:
        if backups >= workers:
            raise ValueError(
                f"`backups`={backups} must be less than the number of workers, {workers}: a step "
                "takes the gradients of the others."
            )
        zero = jnp.zeros((), jnp.int32)
        return StepState(
            params=params,
            optimizer=tx.init(params),
            total=jax.tree.map(jnp.zeros_like, wide(params)),
            arrived=zero,
            step=zero,
            next_step=jnp.zeros(workers, jnp.int32),
            dropped=zero,
        )

    def finish(state: StepState, event: Event, gradient: PyTree) -> tuple[StepState, Sent]:
        wanted = len(state.next_step) - backups
        fresh = state.next_step[event.worker] == state.step
        total = chosen(fresh, plus(state.total, gradient), state.total)
        count = state.arrived + fresh.astype(jnp.int32)

        def step() -> tuple[PyTree, Any, PyTree]:
            mean = narrow(scaled(total, 1 / wanted), state.params)
            updates, optimizer = tx.update(mean, state.optimizer, state.params)
            zeros = jax.tree.map(jnp.zeros_like, total)
            return optax.apply_updates(state.params, updates), optimizer, zeros

        ends = count == wanted
        params, optimizer, total = lax.cond(
            ends, step, lambda: (state.params, state.optimizer, total)
        )
        number = state.step + ends.astype(jnp.int32)
        mine = jnp.where(fresh, state.step + 1, state.step)
        next_step = state.next_step.at[event.worker].set(mine)
        if aborts:
            next_step = jnp.where(ends, number, next_step)
        after = StepState(
            params=params,
            optimizer=optimizer,
            total=total,
            arrived=jnp.where(ends, 0, count),
            step=number,
            next_step=next_step,
            dropped=state.dropped + (~fresh).astype(jnp.int32),
        )
        size = bytes_of(state.params)
        return after, sent(1, size, 1, size)

    def begins(state: StepState, idle: jax.Array) -> jax.Array:
        if aborts:
            return jnp.full(idle.shape, state.arrived == 0)
        return idle & (state.next_step <= state.step)

    return Policy(
        init=init,
        point=lambda state, event: state.params,
        finish=finish,
        model=lambda state: state.params,
        begins=begins,
        restarts=aborts,
    )
