"""Who has finished what when: the clock of a strategy, which training does not change."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.configs import Stragglers
from experiments.errors import ExperimentError
from experiments.straggler_methods import SPEEDS, WORKERS, Strategy
from jaxcomm import synchronization
from jaxcomm.synchronization import Queue, Window

MOST = 8  # Times as many windows as where all do all: beyond that, it is not worth training.


class Link(NamedTuple):
    """Seconds that what is sent takes."""

    all_reduce: float
    message: float  # of all parameters, to one neighbour


class Timeline(NamedTuple):
    """Steps one after the other; leaves [steps, ...]."""

    window: Window
    queue: Queue  # after it
    seconds: np.ndarray  # float64[steps], on the clock at its end
    idle: np.ndarray  # int[steps], windows so far in which nobody finished anything


def _windows(strategy: Strategy, link: Link, speeds: str, seed: int, config: Stragglers) -> Any:
    """All do what they can in the same windows."""
    sent: float | Callable[[jax.Array], jax.Array] = link.all_reduce
    if strategy.mixing:
        meetings = _neighbours(strategy, link, seed)
        sent = lambda step: jnp.max(meetings(step).seconds)  # noqa: E731
    start, close = synchronization.windows(
        SPEEDS[speeds](config.seconds),
        synchronization.all_workers() if strategy.waits else synchronization.fastest_worker(),
        workers=WORKERS,
        minibatches=config.minibatches,
        communication=sent,
        in_flight="finish_late" if strategy.late else "abort",
        seed=seed,
    )

    @jax.jit
    def run() -> Any:
        def body(clock: Any, _: None) -> Any:
            window, clock = close(clock)
            return clock, (window, clock)

        return jax.lax.scan(body, start, length=MOST * config.steps)[1]

    window, clock = jax.device_get(run())
    return Timeline(window, clock.queue, clock.seconds.astype(np.float64), clock.idle)


def _neighbours(
    strategy: Strategy, link: Link, seed: int
) -> Callable[[jax.Array], synchronization.Barrier]:
    assert strategy.mixing is not None
    return synchronization.neighbor_barrier(strategy.mixing(), seconds=link.message, seed=seed)


def _meetings(strategy: Strategy, link: Link, speeds: str, seed: int, config: Stragglers) -> Any:
    """All do all that they have, and wait for those whom they meet."""
    straggler, each = SPEEDS[speeds](config.seconds), strategy.minibatches(config)
    steps = config.steps * config.minibatches // each
    meetings = (
        synchronization.global_barrier(WORKERS, period=config.period, seconds=link.all_reduce)
        if strategy.local
        else _neighbours(strategy, link, seed)
    )
    key = jax.random.key(seed)

    @jax.jit
    def run() -> jax.Array:
        def body(clocks: jax.Array, step: jax.Array) -> Any:
            work = jnp.sum(straggler.draw(key, step, (WORKERS, each)), axis=1)
            clocks = synchronization.wait_at_barrier(clocks, work, meetings(step))
            return clocks, jnp.max(clocks)

        numbers = jnp.arange(steps, dtype=jnp.int32)
        return jax.lax.scan(body, jnp.zeros(WORKERS), numbers)[1]

    seconds = np.asarray(run(), np.float64)
    everywhere = (steps, WORKERS)
    first = np.broadcast_to(each * np.arange(steps, dtype=np.int32)[:, None], everywhere)
    window = Window(
        np.diff(seconds, prepend=0),
        first,
        np.full(everywhere, each, np.int32),
        np.zeros(everywhere, bool),
    )
    queue = Queue(first + each, np.zeros(everywhere, np.float32))
    return Timeline(window, queue, seconds, np.zeros(steps, np.int32))


@functools.cache
def timeline(
    strategy: Strategy, link: Link, speeds: str, seed: int, config: Stragglers
) -> Timeline:
    """Steps until as many mini-batches are finished as in `config.steps` where all do all.

    Raises:
      ExperimentError: If that takes far more windows.
    """
    in_meetings = strategy.waits and strategy.apart
    found = (_meetings if in_meetings else _windows)(strategy, link, speeds, seed, config)
    wanted = config.steps * WORKERS * config.minibatches
    finished = np.cumsum(found.window.finished.sum(axis=1))
    if finished[-1] < wanted:
        raise ExperimentError(
            f"{len(finished)} windows with the speeds {speeds} hold {finished[-1]} mini-batches, "
            f"and {wanted} are asked for: workers finish next to nothing in a window."
        )
    chunk = strategy.chunk(config)
    steps = -(-(int(np.searchsorted(finished, wanted)) + 1) // chunk) * chunk
    return Timeline(*jax.tree.map(lambda x: x[:steps], tuple(found)))
