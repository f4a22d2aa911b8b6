"""The simulated clock of a strategy, which does not depend on training."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.cli.configs import Stragglers
from experiments.cli.errors import ExperimentError
from experiments.methods.stragglers import SPEEDS, WORKERS, Strategy
from jaxcomm import synchronization
from jaxcomm.synchronization import Queue, Window

MAX_WINDOWS_FACTOR = 8  # Maximum windows over those of a run whose workers finish all mini-batches.


class Link(NamedTuple):
    """Seconds of communication."""

    all_reduce: float
    message: float  # of all parameters, to one neighbor


class Timeline(NamedTuple):
    """Consecutive steps; leaves are [steps, ...]."""

    window: Window
    queue: Queue  # after it
    seconds: np.ndarray  # float64[steps], on the clock at the end of the step
    idle: np.ndarray  # int[steps], windows so far in which no worker finished a mini-batch


def _window_timeline(
    strategy: Strategy, link: Link, speeds: str, seed: int, config: Stragglers
) -> Any:
    """The timeline of common windows, in which workers finish what they can."""
    communication: float | Callable[[jax.Array], jax.Array] = link.all_reduce
    if strategy.mixing:
        barriers = _neighbor_barriers(strategy, link, seed)
        communication = lambda step: jnp.max(barriers(step).seconds)  # noqa: E731
    start, close = synchronization.windows(
        SPEEDS[speeds](config.minibatch_seconds),
        synchronization.all_workers()
        if strategy.waits_for_all
        else synchronization.fastest_worker(),
        workers=WORKERS,
        minibatches=config.minibatches,
        communication_seconds=communication,
        in_flight="finish_late" if strategy.finishes_late else "abort",
        seed=seed,
    )

    @jax.jit
    def run() -> Any:
        def body(clock: Any, _: None) -> Any:
            window, clock = close(clock)
            return clock, (window, clock)

        return jax.lax.scan(body, start, length=MAX_WINDOWS_FACTOR * config.steps)[1]

    window, clock = jax.device_get(run())
    return Timeline(window, clock.queue, clock.seconds.astype(np.float64), clock.idle)


def _neighbor_barriers(
    strategy: Strategy, link: Link, seed: int
) -> Callable[[jax.Array], synchronization.Barrier]:
    assert strategy.mixing is not None
    return synchronization.neighbor_barrier(strategy.mixing(), seconds=link.message, seed=seed)


def _barrier_timeline(
    strategy: Strategy, link: Link, speeds: str, seed: int, config: Stragglers
) -> Any:
    """The timeline of workers that finish all mini-batches and wait at barriers."""
    straggler, each = SPEEDS[speeds](config.minibatch_seconds), strategy.minibatches(config)
    steps = config.steps * config.minibatches // each
    barriers = (
        synchronization.global_barrier(WORKERS, period=config.period, seconds=link.all_reduce)
        if strategy.local
        else _neighbor_barriers(strategy, link, seed)
    )
    key = jax.random.key(seed)

    @jax.jit
    def run() -> jax.Array:
        def body(clocks: jax.Array, step: jax.Array) -> Any:
            work = jnp.sum(straggler.sample(key, step, (WORKERS, each)), axis=1)
            clocks = synchronization.wait_at_barrier(clocks, work, barriers(step))
            return clocks, jnp.max(clocks)

        numbers = jnp.arange(steps, dtype=jnp.int32)
        return jax.lax.scan(body, jnp.zeros(WORKERS), numbers)[1]

    seconds = np.asarray(run(), np.float64)
    shape = (steps, WORKERS)
    first = np.broadcast_to(each * np.arange(steps, dtype=np.int32)[:, None], shape)
    window = Window(
        np.diff(seconds, prepend=0),
        first,
        np.full(shape, each, np.int32),
        np.zeros(shape, bool),
    )
    queue = Queue(first + each, np.zeros(shape, np.float32))
    return Timeline(window, queue, seconds, np.zeros(steps, np.int32))


@functools.cache
def timeline(
    strategy: Strategy, link: Link, speeds: str, seed: int, config: Stragglers
) -> Timeline:
    """Steps until as many mini-batches are finished as in `config.steps` full windows.

    Raises:
      ExperimentError: If that takes more than `MAX_WINDOWS_FACTOR` times as many windows.
    """
    uses_barriers = strategy.waits_for_all and strategy.per_worker_params
    whole_timeline = (_barrier_timeline if uses_barriers else _window_timeline)(
        strategy, link, speeds, seed, config
    )
    required = config.steps * WORKERS * config.minibatches
    finished = np.cumsum(whole_timeline.window.finished.sum(axis=1))
    if finished[-1] < required:
        raise ExperimentError(
            f"{len(finished)} windows with the speeds {speeds} have {finished[-1]} mini-batches of "
            f"the required {required}: workers finish too few in a window."
        )
    chunk = strategy.chunk(config)
    steps = -(-(int(np.searchsorted(finished, required)) + 1) // chunk) * chunk
    return Timeline(*jax.tree.map(lambda x: x[:steps], tuple(whole_timeline)))
