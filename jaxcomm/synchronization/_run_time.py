"""What waiting costs: in closed form where one is known, and simulated."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import _noise
from jaxcomm.synchronization._barriers import BarrierSchedule, wait_at_barrier
from jaxcomm.synchronization._clock import Windows
from jaxcomm.synchronization._require import require_seconds
from jaxcomm.synchronization._stragglers import Straggler


class RunTime(NamedTuple):
    """What is expected of a strategy; times the size of a mini-batch, samples a second."""

    seconds_per_update: float
    minibatches_per_second: float  # of all workers together, that count


def run_time(
    straggler: Straggler, workers: int, waits_for: int, communication: float = 0.0
) -> RunTime:
    r"""Each worker does one mini-batch, and an update takes the first so many of them.

    .. math:: \mathbb{E}\, T_{(k:n)} + c \text{ seconds an update}, \qquad
              \frac{k}{\mathbb{E}\, T_{(k:n)} + c} \text{ mini-batches a second}

    :math:`k = n` is synchronous SGD; fewer are backup workers, whose late gradients are dropped.

    Args:
      straggler: The times.
      workers: :math:`n`.
      waits_for: :math:`k`, 1 to n.
      communication: :math:`c`, seconds that an update takes besides.

    Returns:
      Seconds an update, and mini-batches a second, in expectation.

    Raises:
      ValueError: If a number is out of range, or no closed form is known of these times.

    Example:
      >>> from jaxcomm.synchronization import exponential, run_time
      >>> round(run_time(exponential(mean=1.0), workers=10, waits_for=8).seconds_per_update, 3)
      1.429
    """
    if not 1 <= waits_for <= workers:
        raise ValueError(f"`waits_for` must be 1 to {workers}, got {waits_for!r}.")
    if straggler.order_statistic is None:
        raise ValueError("No closed form is known of these times: simulate windows instead.")
    require_seconds(communication, "communication")
    seconds = straggler.order_statistic(workers, waits_for) + communication
    return RunTime(seconds, waits_for / seconds)


def non_blocking_rate(straggler: Straggler, workers: int) -> float:
    r"""Mini-batches a second of workers that never wait: :math:`\sum_i 1 / \mathbb{E}\, T_i`.

    What windows with `in_flight="finish_late"` come to in the long run, if no worker runs out of
    mini-batches within one.

    Args:
      straggler: The times.
      workers: How many.

    Returns:
      Mini-batches a second of all workers together, in expectation.

    Example:
      >>> from jaxcomm.synchronization import deterministic, non_blocking_rate, run_time
      >>> times = deterministic([1.0] * 4 + [3.0] * 4)
      >>> gain = non_blocking_rate(times, 8) / run_time(times, 8, 8).minibatches_per_second
      >>> round(gain, 3)
      2.0
    """
    return float((1 / straggler.means(workers)).sum())


def windows_run_time(windows: Windows, updates: int = 10_000) -> RunTime:
    """The run time of windows, from so many that are simulated: any trigger, any times.

    Args:
      windows: Of :func:`windows`.
      updates: How many.

    Returns:
      Seconds an update, and mini-batches a second.

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
    meetings: BarrierSchedule,
    workers: int,
    *,
    minibatches: int = 1,
    updates: int = 10_000,
    seed: int = 0,
) -> RunTime:
    """The run time of workers that wait where they meet, from so many simulated steps.

    Of local SGD, D-PSGD and MATCHA, in whose steps every worker does all of its mini-batches.

    Args:
      straggler: The times.
      meetings: Of :func:`global_barrier` or :func:`neighbor_barrier`.
      workers: How many.
      minibatches: Of a worker in a step.
      updates: How many steps.
      seed: Seed of the times.

    Returns:
      Seconds an update, and mini-batches a second.

    Example:
      >>> from jaxcomm import gossip
      >>> from jaxcomm.synchronization import deterministic, barrier_run_time, neighbor_barrier
      >>> ring = neighbor_barrier(gossip.ring(4), seconds=0.5)
      >>> barrier_run_time(deterministic([1.0, 1.0, 1.0, 3.0]), ring, 4, updates=100)
      RunTime(seconds_per_update=4.0, minibatches_per_second=1.0)
    """
    key = _noise.make_key(seed, None)

    @jax.jit
    def last() -> jax.Array:
        def step(clocks: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            work = jnp.sum(straggler.draw(key, number, (workers, minibatches)), axis=1)
            return wait_at_barrier(clocks, work, meetings(number)), None

        clocks, _ = jax.lax.scan(step, jnp.zeros(workers), jnp.arange(updates, dtype=jnp.int32))
        return jnp.max(clocks)

    seconds = float(last())
    return RunTime(seconds / updates, updates * workers * minibatches / seconds)
