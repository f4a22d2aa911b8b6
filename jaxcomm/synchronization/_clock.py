"""Windows one after the other, on a simulated clock."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _noise
from jaxcomm.synchronization._require import require_int, require_seconds
from jaxcomm.synchronization._stragglers import Straggler
from jaxcomm.synchronization._triggers import Trigger
from jaxcomm.synchronization._windows import InFlight, Queue, Window, close_window, new_queue


class Clock(NamedTuple):
    """Where training over windows is."""

    queue: Queue
    windows: jax.Array  # int32[], closed so far
    seconds: jax.Array  # float32[], that they and what was sent after them took
    minibatches: jax.Array  # int32[], that all workers have finished
    idle: jax.Array  # int32[], windows in which nobody has finished any
    starved: jax.Array  # int32[workers], in which each has lost what it did and finished nothing
    rest: jax.Array  # float32[], seconds that are lost in the rounding of `seconds`


class Windows(NamedTuple):
    """A state machine: `window, clock = close(clock)`, under `jax.jit` and in `jax.lax.scan`."""

    start: Clock
    close: Callable[[Clock], tuple[Window, Clock]]


def windows(
    straggler: Straggler,
    trigger: Trigger,
    *,
    workers: int,
    minibatches: int,
    communication: float | Callable[[jax.Array], jax.Array] = 0.0,
    in_flight: InFlight = "finish_late",
    seed: int = 0,
) -> Windows:
    r"""Windows of Non-blocking SGD on a simulated clock.

    .. math:: T \gets T + \tau + c, \qquad \tau = \mathrm{trigger}(t), \quad
              t \sim \mathrm{straggler}

    with :math:`c` for what is sent between two windows, in which nobody computes. With
    :func:`all_workers` this is the clock of synchronous SGD.

    Args:
      straggler: What mini-batches take.
      trigger: What closes a window.
      workers: How many.
      minibatches: M, of each worker in a window at most.
      communication: :math:`c`, seconds, such as :meth:`jaxcomm.wire.Account.seconds` of a step; or
        a function of the windows closed so far, int32[], where they differ.
      in_flight: As for :func:`close_window`. With `"abort"`, the clock counts the windows in which
        a worker has finished nothing, in `starved`.
      seed: Seed of the times.

    Returns:
      The clock before the first window, and what closes the next one. Seconds are summed in
      float32 with what each rounding leaves, so that any number of windows is exact to one.

    Raises:
      ValueError: If the deadline is shorter than any mini-batch is, a worker would never finish
        one with `"abort"` (where times are not drawn), a number is out of range, or the straggler
        or the trigger is of other numbers of workers.

    Example:
      >>> from jaxcomm.synchronization import deterministic, fastest_worker, windows
      >>> start, close = windows(
      ...     deterministic([1.0, 3.0]),
      ...     fastest_worker(),
      ...     workers=2,
      ...     minibatches=4,
      ...     communication=0.5,
      ... )
      >>> window, clock = close(start)
      >>> print(window.finished, clock.seconds, clock.minibatches)
      [4 1] 4.5 5

    References:
      He, Dube, `Accelerating Parallel Stochastic Gradient Descent via Non-blocking Mini-batches
      <https://arxiv.org/abs/2211.00889>`_, 2022. The full paper was not at hand: what is sent is
      taken to pause computation, as a reconstruction.
    """
    require_int(workers, "workers")
    require_int(minibatches, "minibatches")
    if not callable(communication):
        require_seconds(communication, "communication")
    if trigger.longest < straggler.minimum:
        raise ValueError(
            f"A deadline of {trigger.longest:g} seconds is shorter than one mini-batch, which "
            f"takes at least {straggler.minimum:g}: nobody would ever finish one."
        )
    key = _noise.make_key(seed, None)

    def draw(number: jax.Array) -> jax.Array:
        return straggler.draw(key, number, (workers, minibatches))

    def close(clock: Clock) -> tuple[Window, Clock]:
        window, queue = close_window(clock.queue, draw(clock.windows), trigger, in_flight=in_flight)
        finished = window.finished.astype(jnp.int32)
        sent = communication(clock.windows) if callable(communication) else communication
        took = window.seconds + sent + clock.rest
        seconds = clock.seconds + took
        return window, Clock(
            queue=queue,
            windows=clock.windows + 1,
            seconds=seconds,
            minibatches=clock.minibatches + jnp.sum(finished, dtype=jnp.int32),
            idle=clock.idle + jnp.all(finished == 0).astype(jnp.int32),
            starved=clock.starved + ((finished == 0) & (in_flight == "abort")).astype(jnp.int32),
            rest=took - (seconds - clock.seconds),
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
    """Raises where a worker would lose whatever it begins."""

    def finished(number: jax.Array) -> jax.Array:
        window, _ = close_window(new_queue(workers), draw(number), trigger, in_flight="abort")
        return window.finished

    numbers = np.arange(period, dtype=np.int32)
    over_all = jax.jit(lambda numbers: jnp.sum(jax.vmap(finished)(numbers), axis=0))
    # Not called as it is: where a program is traced around, that would be part of it.
    total = over_all.lower(numbers).compile()(numbers)
    if (starved := np.flatnonzero(np.asarray(total) == 0)).size:
        raise ValueError(
            f"`in_flight`='abort' starves the workers {starved.tolist()}: each window is over "
            "before any mini-batch of theirs is, and the next begins it anew. Use `in_flight`="
            "'finish_late' with `stale_params`, or a trigger that waits longer."
        )
