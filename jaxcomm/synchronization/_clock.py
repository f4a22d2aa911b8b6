"""Consecutive windows on a simulated clock."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _noise
from jaxcomm._require import AtLeastZero, Positive, checked
from jaxcomm.synchronization._stragglers import Straggler, seconds_of
from jaxcomm.synchronization._windows import (
    InFlight,
    Queue,
    Trigger,
    Window,
    close_window,
    new_queue,
)


class Clock(NamedTuple):
    """The progress of training over windows."""

    queue: Queue
    windows: jax.Array  # int32[], the number of closed windows
    seconds: jax.Array  # float32[], their duration, including communication after each
    minibatches: jax.Array  # int32[], the number that all workers together have finished
    idle: jax.Array  # int32[], the number of windows in which no worker finished a mini-batch
    starved: jax.Array  # int32[workers], windows in which each aborted its work, finishing nothing
    compensation: jax.Array  # float32[], the rounding error of `seconds`


def resize_clock(clock: Clock, workers: int) -> Clock:
    """The clock for another number of workers: time goes on, and no mini-batch is in flight.

    Positions start at 0 again, since they count mini-batches of a worker's own examples; what the
    old workers have left is dealt by :func:`redeal`. A mini-batch in flight has not finished and
    starts again, also with `in_flight="finish_late"`: its worker may be gone. So the new workers
    have no stale parameters. The first worker has the total of `starved`.

    Args:
      clock: The clock of the old workers.
      workers: The number of new workers, for which :func:`windows` is called again.

    Returns:
      The clock of the new workers.

    Raises:
      ValueError: If `workers` is not a positive int.

    Example:
      >>> from jaxcomm.synchronization import deterministic, fastest_worker, resize_clock, windows
      >>> start, close = windows(
      ...     deterministic([1.0, 3.0]), fastest_worker(), workers=2, minibatches=4
      ... )
      >>> clock = resize_clock(close(start)[1], 3)
      >>> print(clock.seconds, clock.minibatches, clock.queue.position)
      4.0 5 [0 0 0]
    """
    starved = jnp.zeros(workers, jnp.int32).at[0].set(jnp.sum(clock.starved, dtype=jnp.int32))
    return clock._replace(queue=new_queue(workers), starved=starved)


class Windows(NamedTuple):
    """A state machine: `window, clock = close(clock)`, under `jax.jit` and in `jax.lax.scan`."""

    start: Clock
    close: Callable[[Clock], tuple[Window, Clock]]


@checked
def windows(
    straggler: Straggler,
    trigger: Trigger,
    *,
    workers: Positive,
    minibatches: Positive,
    communication_seconds: AtLeastZero | Callable[[jax.Array], jax.Array] = 0.0,
    in_flight: InFlight = "finish_late",
    seed: int | jax.Array = 0,
) -> Windows:
    r"""Windows of Non-blocking SGD on a simulated clock.

    .. math:: T \gets T + \tau + c, \qquad \tau = \mathrm{trigger}(t), \quad
              t \sim \mathrm{straggler}

    Here :math:`c` is the communication time between two windows, during which no worker computes.
    With :func:`all_workers`, this is the clock of synchronous SGD.

    Args:
      straggler: The model of mini-batch times.
      trigger: The rule that ends a window.
      workers: The number of workers.
      minibatches: M, the largest number of mini-batches per worker and window.
      communication_seconds: :math:`c`, seconds, such as the `seconds(bytes_per_second)` of
        :func:`jaxcomm.wire.account` of a step; or a function of the number of closed windows,
        int32[], if the seconds vary.
      in_flight: The treatment of a mini-batch that is half finished when a window ends.
        `"finish_late"` continues it, with the gradient at the parameters at which it began; see
        :func:`stale_params`. `"abort"` restarts it in the next window at the new parameters. If
        every window is too short for a worker, that worker never finishes a mini-batch; the clock's
        field `starved` counts the windows in which a worker finished nothing. A restarted
        mini-batch has a new random time, so of heavy-tailed times, more mini-batches are finished
        than without restarts.
      seed: Seed of the times.

    Returns:
      `(start, close)`: the clock before the first window, and `close(clock) -> (window, clock)`,
      which runs under `jax.jit` and in `jax.lax.scan`. A window has its `seconds`, float32[];
      `first`, int32[workers], the number of each worker's first mini-batch; `finished`, how many it
      finished from that one on, int32[workers], or uint32 if the first may be late and needs
      `stale_params`; and `stale`, bool[workers], whether the first one began in an earlier window.
      Unfinished mini-batches stay in order, so an epoch neither loses nor repeats one. A clock has
      `windows`, int32[], how many are closed; `seconds`, float32[], with communication, summed with
      an error of one rounding; `minibatches`, int32[], finished by all workers together; `idle`,
      int32[], windows in which no worker finished one; `starved`, int32[workers]; and `queue`, with
      `position`, int32[workers], the mini-batches that each worker has finished, and
      `remaining_seconds`, float32[workers], of the one in flight.

    Raises:
      ValueError: If the deadline is shorter than any mini-batch, a number is out of range, or the
        straggler or the trigger is for another number of workers. With `"abort"`, also if a worker
        would never finish a mini-batch; this is checked only if times are not random.

    Example:
      >>> from jaxcomm.synchronization import deterministic, fastest_worker, windows
      >>> start, close = windows(
      ...     deterministic([1.0, 3.0]),
      ...     fastest_worker(),
      ...     workers=2,
      ...     minibatches=4,
      ...     communication_seconds=0.5,
      ... )
      >>> window, clock = close(start)
      >>> print(window.finished, clock.seconds, clock.minibatches)
      [4 1] 4.5 5

    References:
      He, Dube, `Accelerating Parallel Stochastic Gradient Descent via Non-blocking Mini-batches
      <https://arxiv.org/abs/2211.00889>`_, 2022. The full paper was not available: the assumption
      that communication pauses computation is a reconstruction.
    """
    if trigger.max_seconds < straggler.minimum:
        raise ValueError(
            f"No mini-batch ends within a deadline of {trigger.max_seconds:g} seconds."
        )
    key = _noise.make_key(seed)

    def draw(number: jax.Array) -> jax.Array:
        return straggler.sample(key, number, (workers, minibatches))

    def close(clock: Clock) -> tuple[Window, Clock]:
        window, queue = close_window(clock.queue, draw(clock.windows), trigger, in_flight=in_flight)
        finished = window.finished.astype(jnp.int32)
        sent = seconds_of(communication_seconds, clock.windows)
        took = window.seconds + sent + clock.compensation
        seconds = clock.seconds + took
        return window, Clock(
            queue=queue,
            windows=clock.windows + 1,
            seconds=seconds,
            minibatches=clock.minibatches + jnp.sum(finished, dtype=jnp.int32),
            idle=clock.idle + jnp.all(finished == 0).astype(jnp.int32),
            starved=clock.starved + ((finished == 0) & (in_flight == "abort")).astype(jnp.int32),
            compensation=took - (seconds - clock.seconds),
        )

    zero, none = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
    start = Clock(new_queue(workers), zero, none, zero, zero, jnp.zeros(workers, jnp.int32), none)
    jax.eval_shape(close, start)
    if in_flight == "abort" and straggler.period is not None:
        _require_progress(draw, straggler.period, trigger, workers)
    return Windows(start, close)


def _require_progress(
    draw: Callable[[jax.Array], jax.Array], period: int, trigger: Trigger, workers: int
) -> None:
    """Raises if a worker would never finish a mini-batch."""

    def finished(number: jax.Array) -> jax.Array:
        window, _ = close_window(new_queue(workers), draw(number), trigger, in_flight="abort")
        return window.finished

    numbers = np.arange(period, dtype=np.int32)
    over_all = jax.jit(lambda numbers: jnp.sum(jax.vmap(finished)(numbers), axis=0))
    # Compiled explicitly: a direct call would become part of a surrounding traced program.
    total = over_all.lower(numbers).compile()(numbers)
    if (starved := np.flatnonzero(np.asarray(total) == 0)).size:
        raise ValueError(
            f"`in_flight`='abort' starves the workers {starved.tolist()}: each window ends before "
            "their first mini-batch. Use 'finish_late' with `stale_params`, or longer windows."
        )
