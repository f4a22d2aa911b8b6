"""Barriers, at which workers wait for each other, and the cost of waiting."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _noise, gossip
from jaxcomm._require import AtLeastZero, Positive, checked
from jaxcomm.synchronization._clock import Windows
from jaxcomm.synchronization._stragglers import Straggler


class Barrier(NamedTuple):
    """The barrier at the end of a step."""

    waits_for: jax.Array  # bool[workers, workers], row i: the workers that worker i waits for
    seconds: jax.Array  # float32[workers], the communication time of each worker


BarrierSchedule: TypeAlias = Callable[[jax.Array], Barrier]
"""A function from the number of steps so far, int32[], to the barrier of the next step."""


@checked
def global_barrier(
    workers: int, *, period: Positive = 1, seconds: AtLeastZero = 0.0
) -> BarrierSchedule:
    """All workers wait for each other after every `period` steps, and at no other time.

    This is the barrier of synchronous SGD, or of local SGD.

    Args:
      workers: The number of workers.
      period: The number of steps between barriers.
      seconds: The communication time of a barrier.

    Returns:
      A function from the number of steps so far, int32[], to the barrier at the end of the next
      step: `waits_for`, bool[workers, workers], where row i has the workers that worker i waits
      for, and `seconds`, float32[workers], the communication time of each worker.

    Raises:
      ValueError: If `period` is not a positive int, or `seconds` is negative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm.synchronization import global_barrier
      >>> global_barrier(2, period=3)(jnp.int32(2)).waits_for.tolist()
      [[True, True], [True, True]]
    """
    identity = jnp.eye(workers, dtype=bool)

    def barrier(step: jax.Array) -> Barrier:
        due = step % period == period - 1
        return Barrier(identity | due, jnp.where(due, jnp.full(workers, seconds, jnp.float32), 0))

    return barrier


@checked
def neighbor_barrier(
    mixing: Any, *, seconds: AtLeastZero = 0.0, seed: int | jax.Array = 0
) -> BarrierSchedule:
    """Workers wait for the neighbors from which they receive messages in a step.

    Args:
      mixing: As for :func:`jaxcomm.gossip.dpsgd`. With the same `seed`, random graphs are the same
        as in the gossip method.
      seconds: The time of a message. A worker receives its messages one after the other.
      seed: Seed for random mixing.

    Returns:
      A function from the number of steps so far, int32[], to the barrier at the end of the next
      step: `waits_for`, bool[workers, workers], where row i has the workers that worker i waits
      for, and `seconds`, float32[workers], the communication time of each worker.

    Raises:
      ValueError: If `mixing` is invalid, or `seconds` is negative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import gossip
      >>> from jaxcomm.synchronization import neighbor_barrier
      >>> neighbor_barrier(gossip.ring(4), seconds=1.0)(jnp.int32(0)).seconds.tolist()
      [2.0, 2.0, 2.0, 2.0]
    """
    resolved = gossip.to_mixing(mixing)
    identity = np.eye(resolved.workers, dtype=bool)
    links = np.stack([matrix != 0 for matrix in resolved.matrices]) & ~identity
    key = _noise.make_key(seed)

    def barrier(step: jax.Array) -> Barrier:
        active = jnp.asarray(links)
        if resolved.active:
            (keys,) = _noise.keys_per_unit(key, step, 1, jnp.zeros((), jnp.int32))
            flags = resolved.active(keys.shared, step.astype(jnp.uint32))
            active = active & flags[:, None, None]
        messages = jnp.sum(active, axis=(0, 2), dtype=jnp.int32)
        return Barrier(jnp.any(active, axis=0) | identity, seconds * messages.astype(jnp.float32))

    return barrier


def wait_at_barrier(clocks: jax.Array, work: jax.Array, barrier: Barrier) -> jax.Array:
    r"""The clocks of workers after a step and the barrier at its end.

    .. math:: T_i \gets \max_{j \in \{i\} \cup \mathrm{waits}(i)} (T_j + w_j) + c_i

    Args:
      clocks: :math:`T`, float32[workers], seconds.
      work: :math:`w`, float32[workers], seconds of the step.
      barrier: The barrier: which workers wait for which, and :math:`c`.

    Returns:
      float32[workers], seconds.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import gossip
      >>> from jaxcomm.synchronization import neighbor_barrier, wait_at_barrier
      >>> barrier = neighbor_barrier(gossip.ring(3))(jnp.int32(0))
      >>> print(wait_at_barrier(jnp.zeros(3), jnp.array([1.0, 2.0, 5.0]), barrier))
      [5. 5. 5.]
    """
    done = clocks + work
    return (
        jnp.max(jnp.where(barrier.waits_for, done[None, :], done[:, None]), axis=1)
        + barrier.seconds
    )


class RunTime(NamedTuple):
    """Expected or simulated run time. Multiply by the mini-batch size for samples per second."""

    seconds_per_update: float
    minibatches_per_second: float  # counted mini-batches of all workers together


def run_time(
    straggler: Straggler, workers: int, waits_for: int, communication_seconds: float = 0.0
) -> RunTime:
    r"""The run time if each worker does one mini-batch and an update uses the first k of them.

    .. math:: \mathbb{E}\, T_{(k:n)} + c \text{ seconds per update}, \qquad
              \frac{k}{\mathbb{E}\, T_{(k:n)} + c} \text{ mini-batches per second}

    Here :math:`T_{(k:n)}` is the k-th smallest of n mini-batch times. With :math:`k = n` this is
    synchronous SGD. With :math:`k < n`, the others are backup workers, whose late gradients are
    dropped. Workers that never wait finish :math:`\sum_i 1 / \mathbb{E}\, T_i` mini-batches per
    second, `(1 / straggler.means(n)).sum()`; windows with `in_flight="finish_late"` approach this.

    Args:
      straggler: The model of mini-batch times.
      workers: :math:`n`.
      waits_for: :math:`k`, 1 to n.
      communication_seconds: :math:`c`, seconds of communication per update.

    Returns:
      `seconds_per_update` and `minibatches_per_second` of all workers together, expected; floats.

    Raises:
      ValueError: If a number is out of range, or the straggler has no closed form.

    Example:
      >>> from jaxcomm.synchronization import run_time, shifted_exponential
      >>> round(
      ...     run_time(shifted_exponential(mean=1.0), workers=10, waits_for=8).seconds_per_update,
      ...     3,
      ... )
      1.429
    """
    if not 1 <= waits_for <= workers:
        raise ValueError(f"`waits_for` must be 1 to {workers}, got {waits_for!r}.")
    if straggler.order_statistic is None:
        raise ValueError("This straggler has no closed form: use `windows_run_time`.")
    seconds = straggler.order_statistic(workers, waits_for) + communication_seconds
    return RunTime(seconds, waits_for / seconds)


def windows_run_time(windows: Windows, updates: int = 10_000) -> RunTime:
    """Simulates windows and returns their run time, for any trigger and any straggler.

    Args:
      windows: The result of :func:`windows`.
      updates: The number of simulated windows.

    Returns:
      `seconds_per_update` and `minibatches_per_second`, as for :func:`run_time`.

    Example:
      >>> from jaxcomm.synchronization import (
      ...     deterministic,
      ...     fastest_worker,
      ...     windows,
      ...     windows_run_time,
      ... )
      >>> times = deterministic([1.0, 3.0])
      >>> run = windows_run_time(windows(times, fastest_worker(), workers=2, minibatches=6), 100)
      >>> run.seconds_per_update, round(run.minibatches_per_second, 4)  # 6 + 2 in 6 seconds
      (6.0, 1.3333)
    """

    @jax.jit
    def last() -> tuple[jax.Array, jax.Array]:
        clock, _ = jax.lax.scan(
            lambda clock, _: (windows.close(clock)[1], None), windows.start, length=updates
        )
        return clock.seconds, clock.minibatches

    seconds, minibatches = map(float, last())
    return RunTime(seconds / updates, minibatches / seconds)


def barrier_run_time(
    straggler: Straggler,
    barriers: BarrierSchedule,
    workers: int,
    *,
    minibatches: int = 1,
    updates: int = 10_000,
    seed: int = 0,
) -> RunTime:
    """Simulates workers that wait at barriers and returns their run time.

    Valid for local SGD, D-PSGD and MATCHA, in whose steps every worker does all its mini-batches.

    Args:
      straggler: The model of mini-batch times.
      barriers: The result of :func:`global_barrier` or :func:`neighbor_barrier`.
      workers: The number of workers.
      minibatches: The number of mini-batches per worker and step.
      updates: The number of simulated steps.
      seed: Seed of the times.

    Returns:
      `seconds_per_update` and `minibatches_per_second`, as for :func:`run_time`.

    Example:
      >>> from jaxcomm import gossip
      >>> from jaxcomm.synchronization import deterministic, barrier_run_time, neighbor_barrier
      >>> ring = neighbor_barrier(gossip.ring(4), seconds=0.5)
      >>> barrier_run_time(deterministic([1.0, 1.0, 1.0, 3.0]), ring, 4, updates=100)
      RunTime(seconds_per_update=4.0, minibatches_per_second=1.0)
    """
    key = _noise.make_key(seed)

    @jax.jit
    def last() -> jax.Array:
        def step(clocks: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            work = jnp.sum(straggler.sample(key, number, (workers, minibatches)), axis=1)
            return wait_at_barrier(clocks, work, barriers(number)), None

        clocks, _ = jax.lax.scan(step, jnp.zeros(workers), jnp.arange(updates, dtype=jnp.int32))
        return jnp.max(clocks)

    seconds = float(last())
    return RunTime(seconds / updates, updates * workers * minibatches / seconds)
