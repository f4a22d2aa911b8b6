"""The simulated clock of a method, which does not depend on training."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.methods.stragglers import (
    BLOCKING,
    FINISH_LATE,
    METHODS,
    NEW_TIME,
    SPEEDS,
    WORKERS,
    Method,
)
from jaxcomm import synchronization
from jaxcomm.synchronization import Trigger
from jaxcomm.synchronization._run_time import Barrier
from jaxcomm.synchronization._windows import Queue, Window, close_window, new_queue

MAX_MINIBATCHES = 8  # Per worker and step.
CHUNK = 256  # Steps of one call of a compiled program.


class Link(NamedTuple):
    """Seconds of communication."""

    all_reduce: float
    message: float  # of all parameters, to one neighbor
    signal: float  # of the fastest worker to all others: its window has ended


class Timeline(NamedTuple):
    """Consecutive steps; leaves are [steps, ...]."""

    window: Window
    queue: Queue  # after it
    seconds: np.ndarray  # float64[steps], on the clock at the end of the step
    aborted: np.ndarray  # float64[steps], worker-seconds so far on mini-batches that were aborted


def _barriers(method: Method, link: Link, period: Any, seed: Any) -> Callable[[Any], Barrier]:
    """Which workers wait for each other after a step, and the seconds of their exchange."""
    if method.mixing:
        neighbors = synchronization.neighbor_barrier(method.mixing(), seconds=1.0, seed=seed)

        def of_neighbors(step: jax.Array) -> Barrier:
            barrier = neighbors(step)
            return barrier._replace(seconds=barrier.seconds * link.message)

        return of_neighbors

    def of_all(step: jax.Array) -> Barrier:
        due = (step + 1) % period == 0
        seconds = jnp.where(due, jnp.full(WORKERS, link.all_reduce), 0)
        return Barrier(jnp.eye(WORKERS, dtype=bool) | due, seconds)

    return of_all


def _times(straggler: Any, key: jax.Array, first: jax.Array, minibatches: jax.Array) -> jax.Array:
    """The seconds of mini-batches of each worker from its `first` on, [workers, most].

    They depend only on the number of the mini-batch, so that all forms have the same times. After
    the number of mini-batches, they are infinite.
    """

    def seconds(worker: jax.Array, number: jax.Array) -> jax.Array:
        return straggler.sample(key, number, (WORKERS, 1))[worker, 0]

    numbers = first[:, None] + jnp.arange(MAX_MINIBATCHES, dtype=jnp.int32)[None]
    times = jax.vmap(jax.vmap(seconds, (None, 0)))(jnp.arange(WORKERS), numbers)
    return _only_first(times, minibatches)


def _only_first(times: jax.Array, minibatches: jax.Array) -> jax.Array:
    return jnp.where(jnp.arange(MAX_MINIBATCHES)[None] < minibatches, times, jnp.inf)


@functools.cache
def _blocking(method: str, speeds: str, minibatch_seconds: float) -> Callable[..., Any]:
    """Steps in which all workers finish all mini-batches, and wait at barriers."""
    straggler = SPEEDS[speeds].straggler(minibatch_seconds)

    @jax.jit
    def run(carry: Any, link: Link, minibatches: Any, period: Any, seed: Any) -> Any:
        barriers, key = _barriers(METHODS[method], link, period, seed), jax.random.key(seed)

        def body(carry: Any, _: None) -> Any:
            clocks, step = carry
            first = jnp.full(WORKERS, step * minibatches)
            times = _times(straggler, key, first, minibatches)
            work = jnp.sum(jnp.where(jnp.isinf(times), 0, times), axis=1)
            later = synchronization.wait_at_barrier(clocks, work, barriers(step))
            length = jnp.max(later) - jnp.max(clocks)
            finished, none = jnp.full(WORKERS, minibatches), jnp.zeros(WORKERS)
            window = Window(length, first, finished, none > 0)
            return (later, step + 1), (window, Queue(first + finished, none), none[0])

        return jax.lax.scan(body, carry, length=CHUNK)

    return run


@functools.cache
def _non_blocking(
    method: str, form: str, speeds: str, minibatch_seconds: float
) -> Callable[..., Any]:
    """Windows that end when the fastest worker has finished; then all workers exchange."""
    straggler = SPEEDS[speeds].straggler(minibatch_seconds)

    @jax.jit
    def run(carry: Any, link: Link, minibatches: Any, period: Any, seed: Any) -> Any:
        barriers, key = _barriers(METHODS[method], link, period, seed), jax.random.key(seed)
        fastest = Trigger(lambda done: jnp.min(jnp.take(done, minibatches - 1, axis=1)))

        def body(carry: Any, _: None) -> Any:
            queue, step = carry
            times = _times(straggler, key, queue.position, minibatches)
            if form == NEW_TIME:
                drawn = straggler.sample(key, step, (WORKERS, MAX_MINIBATCHES))
                times = _only_first(drawn, minibatches)
            window, queue = close_window(
                queue, times, fastest, in_flight="finish_late" if form == FINISH_LATE else "abort"
            )
            finished = window.finished.astype(jnp.int32)
            is_done = jnp.arange(MAX_MINIBATCHES)[None] < finished[:, None]
            done = jnp.sum(jnp.where(is_done, times, 0), axis=1)
            aborted = jnp.sum(jnp.where(finished < minibatches, window.seconds - done, 0))
            length = window.seconds + link.signal + jnp.max(barriers(step).seconds)
            window = window._replace(seconds=length, finished=finished)
            return (queue, step + 1), (
                window,
                queue,
                0 * aborted if form == FINISH_LATE else aborted,
            )

        return jax.lax.scan(body, carry, length=CHUNK)

    return run


def timeline(
    method: str,
    form: str,
    speeds: str,
    link: Link,
    *,
    seconds: float,
    minibatch_seconds: float,
    minibatches: int,
    period: int,
    seed: int,
) -> Timeline:
    """The steps that end within `seconds`, and at least one."""
    step = jnp.zeros((), jnp.int32)
    carry: Any = (jnp.zeros(WORKERS), step)
    run = _blocking(method, speeds, minibatch_seconds)
    if form != BLOCKING:
        carry = (new_queue(WORKERS), step)
        run = _non_blocking(method, form, speeds, minibatch_seconds)
    chunks: list[Any] = []
    clock = 0.0
    while clock <= seconds:
        counts = (jnp.int32(each) for each in (minibatches, period, seed))
        carry, chunk = run(carry, link, *counts)
        chunks.append(jax.device_get(chunk))
        clock += float(chunks[-1][0].seconds.sum(dtype=np.float64))
    window, queue, aborted = jax.tree.map(lambda *parts: np.concatenate(parts), *chunks)
    clocks = np.cumsum(window.seconds, dtype=np.float64)
    steps = max(1, int(np.searchsorted(clocks, seconds, side="right")))
    whole = Timeline(window, queue, clocks, np.cumsum(aborted, dtype=np.float64))
    return jax.tree.map(lambda x: x[:steps], whole)
