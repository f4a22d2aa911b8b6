"""Training in windows that all workers end together, some of them slow, on a simulated clock."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from experiments.errors import ExperimentError
from experiments.studies.gossip import GRAPHS, plan
from experiments.study.run import Setting
from experiments.tasks.task import Task
from jaxcomm import gossip, synchronization
from jaxcomm.synchronization import Straggler, Trigger
from jaxcomm.synchronization._run_time import Barrier
from jaxcomm.synchronization._windows import InFlight, Queue, Window, close_window, new_queue

WORKERS = 8
SLOW_WORKER = WORKERS - 1  # No worker is slower.
MINIBATCH = 16  # Examples. One takes 10 ms on a fast worker.
BANDWIDTH, LATENCY = 12.5e6, 2e-4  # Bytes per second that a worker sends; seconds per message.
GRAPH = "erdos_renyi_8"

MAX_MINIBATCHES = 8  # Per worker and step.
LENGTH = 4096  # The most steps; and the mini-batches of a worker after which times repeat.


class Speeds(NamedTuple):
    """A model of slow workers."""

    description: str
    straggler: Straggler
    is_random: bool = False
    slowdown: float = 1.0  # The mean time of the slowest worker over that of the fastest.


def with_delay(straggler: Straggler, delay: Straggler) -> Straggler:
    """The times of a straggler plus random delays."""
    return Straggler(
        lambda *arguments: straggler.sample(*arguments) + delay.sample(*arguments),
        lambda workers: straggler.means(workers) + delay.means(workers),
        None,
        straggler.minimum + delay.minimum,
    )


TWO_SPEEDS = synchronization.deterministic([0.01] * 4 + [0.03] * 4)
EXPONENTIAL = synchronization.shifted_exponential(mean=0.01)
SPEEDS = {
    "3:1": Speeds("half of the workers are three times slower", TWO_SPEEDS, slowdown=3),
    "exponential": Speeds(
        "exponential times with the same mean for each worker", EXPONENTIAL, is_random=True
    ),
    "pareto": Speeds(  # Below an exponent of 2, the variance is infinite.
        "Pareto times with the exponent 1.5 and the same mean for each worker",
        synchronization.pareto(scale=0.01 / 3, shape=1.5),
        is_random=True,
    ),
    "sleep": Speeds(
        "one of 20 mini-batches takes 21 times as long as the others, with the same mean for each "
        "worker",
        synchronization.bernoulli_sleep(base=0.005, sleep=0.1, probability=0.05),
        is_random=True,
    ),
    "delay": Speeds(
        "`3:1`, plus an exponential delay of each mini-batch with the mean of a fast mini-batch. "
        "The paper's analysis has these two causes, the throughput of devices and random delays; "
        "its distributions and their parameters were not available",
        with_delay(TWO_SPEEDS, EXPONENTIAL),
        is_random=True,
        slowdown=2,
    ),
    "dead_slow": Speeds(
        "one worker is 100 times slower",
        synchronization.deterministic([0.01] * 7 + [1.0]),
        slowdown=100,
    ),
}


class Form(NamedTuple):
    """What the workers wait for before they exchange updates."""

    description: str
    waits: bool = False
    draws_again: bool = False
    in_flight: InFlight = "abort"


FORMS = {
    "blocking": Form(
        "workers wait until those from which they receive have finished all mini-batches",
        waits=True,
    ),
    "abort_new_time": Form(
        "a window ends when the fastest worker has finished; the others abort the mini-batch in "
        "flight and restart it in the next window with a new random time",
        draws_again=True,
    ),
    "abort_same_time": Form(
        "the same, but the restarted mini-batch takes as long as it would have"
    ),
    "finish_late": Form(
        "the same end of a window; a mini-batch in flight counts in a later window, with the "
        "gradient at the parameters at which it began",
        in_flight="finish_late",
    ),
}


class Method(NamedTuple):
    """How workers exchange updates."""

    description: str
    build: Callable[..., optax.GradientTransformation]  # of the rate, the seed and the period
    mixing: Callable[[], Any] | None = None  # the neighbors of each worker; None is all workers
    has_own_params: bool = True  # whether parameters differ by worker


METHODS = {
    "all_reduce": Method(
        "the mean over all workers, which is synchronous SGD if blocking",
        lambda rate, seed, period: optax.chain(jaxcomm.mean(), optax.sgd(rate)),
        has_own_params=False,
    ),
    "local_sgd": Method(
        "local steps of one mini-batch, with a periodic all-reduce",
        lambda rate, seed, period: optax.chain(
            optax.sgd(rate), synchronization.local_sgd(lambda step: period)
        ),
    ),
    "dpsgd": Method(
        "local steps and gossip with all neighbors, on the graph of figure 1a of MATCHA's paper",
        lambda rate, seed, period: optax.chain(
            optax.sgd(rate), gossip.dpsgd(GRAPHS[GRAPH], order="adapt_then_combine", seed=seed)
        ),
        lambda: GRAPHS[GRAPH],
    ),
    "matcha": Method(
        "the same over a random half of the matchings per step",
        lambda rate, seed, period: optax.chain(
            optax.sgd(rate), gossip.matcha(plan(GRAPH), seed=seed)
        ),
        lambda: plan(GRAPH),
    ),
}


def forms_of(method: str, speeds: str) -> list[str]:
    """The different forms of a method. Without random times, both forms that abort are the same."""
    if method == "local_sgd":
        return ["blocking"]
    return [
        name for name, form in FORMS.items() if SPEEDS[speeds].is_random or not form.draws_again
    ]


class Logged(NamedTuple):
    """The states at the times; leaves are [points, ...]."""

    params: Any  # as the method returns them at this time
    step: Any  # steps so far, or events
    seconds: Any  # when the parameters became these
    staleness: Any  # the mean number of events of others since a gradient began
    uploads: Any  # messages to the server or a neighbor, per gradient


class Link(NamedTuple):
    """Seconds of communication."""

    all_reduce: float
    message: float  # of all parameters, to one neighbor


class Timeline(NamedTuple):
    """Consecutive steps; leaves are [steps, ...]."""

    window: Window
    queue: Queue  # after it


@functools.lru_cache(maxsize=64)
def seconds_of(speeds: str, seed: int) -> jax.Array:
    """The seconds of each mini-batch in all forms, float32[LENGTH, workers]."""
    key, sample = jax.random.key(seed), SPEEDS[speeds].straggler.sample
    numbers = jnp.arange(LENGTH, dtype=jnp.int32)
    return jax.vmap(lambda number: sample(key, number, (WORKERS, 1))[:, 0])(numbers)


@functools.cache
def _compiled_timeline(method: str, form: str, speeds: str, link: Link) -> Callable[..., Timeline]:
    """`LENGTH` steps of the clock, compiled for all mini-batches and seeds."""
    mixing, chosen = METHODS[method].mixing, FORMS[form]
    numbers = jnp.arange(MAX_MINIBATCHES, dtype=jnp.int32)[None]

    @jax.jit
    def run(minibatches, period, seed, seconds):
        key = jax.random.key(seed)
        fastest = Trigger(lambda done: jnp.min(jnp.take(done, minibatches - 1, axis=1)))

        def of_all(step):
            due = (step + 1) % period == 0
            exchange = jnp.where(due, jnp.full(WORKERS, link.all_reduce), 0)
            return Barrier(jnp.eye(WORKERS, dtype=bool) | due, exchange)

        barrier = of_all if mixing is None else synchronization.neighbor_barrier(
            mixing(), seconds=link.message, seed=seed
        )  # fmt: skip

        def minibatches_from(first, others):
            places = (first[:, None] + numbers) % LENGTH
            times = jnp.take_along_axis(seconds.T, places, axis=1)
            return jnp.where(numbers < minibatches, times, others)

        def wait(clocks, step):
            first = jnp.full(WORKERS, step * minibatches)
            work = jnp.sum(minibatches_from(first, 0.0), axis=1)
            later = synchronization.wait_at_barrier(clocks, work, barrier(step))
            finished, none = jnp.full(WORKERS, minibatches), jnp.zeros(WORKERS)
            window = Window(jnp.max(later) - jnp.max(clocks), first, finished, none > 0)
            return later, Timeline(window, Queue(first + finished, none))

        def close(queue, step):
            times = minibatches_from(queue.position, jnp.inf)
            if chosen.draws_again:
                drawn = SPEEDS[speeds].straggler.sample(key, step, (WORKERS, MAX_MINIBATCHES))
                times = jnp.where(numbers < minibatches, drawn, jnp.inf)
            window, queue = close_window(queue, times, fastest, in_flight=chosen.in_flight)
            length = window.seconds + LATENCY + jnp.max(barrier(step).seconds)
            finished = window.finished.astype(jnp.int32)
            return queue, Timeline(window._replace(seconds=length, finished=finished), queue)

        body, start = (wait, jnp.zeros(WORKERS)) if chosen.waits else (close, new_queue(WORKERS))
        return jax.lax.scan(body, start, jnp.arange(LENGTH, dtype=jnp.int32))[1]

    return run


def timeline(
    method: str, form: str, speeds: str, link: Link, *,
    seconds: float, minibatches: int, period: int, seed: int,
) -> tuple[Timeline, np.ndarray]:  # fmt: skip
    """The steps of the clock, and when those end that end within `seconds`, and at least one."""
    counts = map(jnp.int32, (minibatches, period, seed))
    run = _compiled_timeline(method, form, speeds, link)
    found = jax.device_get(run(*counts, seconds_of(speeds, seed)))
    ends = np.cumsum(found.window.seconds, dtype=np.float64)
    if ends[-1] <= seconds:
        raise ExperimentError(f"More than {LENGTH} steps end within {seconds:g} seconds.")
    return found, ends[: max(1, np.searchsorted(ends, seconds, side="right"))]


@functools.cache
def program(task: Task, method: str) -> Callable[..., Any]:
    """A training, compiled for all forms, rates, seeds and timelines."""
    chosen = METHODS[method]

    def of_workers(params):
        if chosen.has_own_params:
            return params.per_worker["data"]
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (WORKERS, *x.shape)), params)

    @jax.jit
    def trained(weights, options, shards, steps, stops):
        """The parameters after the numbers of steps `stops`, [points, ...]."""
        key, tx = jax.random.key(options[1]), chosen.build(*options)
        gradients = synchronization.window_gradients
        step = jaxcomm.simulate(task.loss, tx, WORKERS, gradients=gradients)

        def take(number, carry):
            params, state, stale_params = carry
            window, queue = jax.tree.map(lambda x: x[number], steps)
            batch = synchronization.window_batches(
                key, shards, window.first, minibatches=MAX_MINIBATCHES, batch_size=MINIBATCH
            )
            new, state, _ = step(params, state, (batch, window.finished, stale_params))
            points = of_workers(params), of_workers(new)
            return new, state, synchronization.stale_params(window, queue, stale_params, *points)

        def until(carry, ends):
            carry = jax.lax.fori_loop(*ends, take, carry)
            return carry, jaxcomm.consensus(carry[0]) if chosen.has_own_params else carry[0]

        params = jaxcomm.replicate(weights, WORKERS) if chosen.has_own_params else weights
        start = params, jaxcomm.init(tx, params, WORKERS), of_workers(params)
        stops = stops.astype(jnp.int32)
        return jax.lax.scan(until, start, (jnp.pad(stops, (1, 0))[:-1], stops))[1]

    return trained


@functools.cache
def link_of(task: Task, method: str) -> Link:
    """The seconds of communication in a step: of all leaves together, as XLA combines them.

    Scalars are excluded: they are metrics, and the count, which XLA could combine with leaves.
    """
    chosen, params = METHODS[method], task.first_weights(0)
    tx = chosen.build(0.1, 0, 1)
    params = jaxcomm.replicate(params, WORKERS) if chosen.has_own_params else params
    step = jaxcomm.simulate(lambda w, x: sum(map(jnp.sum, jax.tree.leaves(w))), tx, WORKERS)
    state = jaxcomm.init(tx, params, WORKERS)
    sent = jaxcomm.wire.account(step, params, state, jnp.zeros(WORKERS)).collectives
    reduced, messages = (
        [each.bytes_per_worker for each in sent if each.shape and each.kind == primitive]
        for primitive in ("all_reduce", "ppermute")
    )
    return Link(
        2 * (WORKERS - 1) * LATENCY + sum(reduced) / BANDWIDTH if reduced else 0.0,
        LATENCY + max(messages) / BANDWIDTH if messages else 0.0,
    )


def run(
    setting: Setting, parameters: Setting, seed: int, task: Task, shards: Any, times: np.ndarray
) -> Logged:
    """Trains until the ends of the last windows before the logged times.

    Args:
      setting: The method, its form, and the speeds.
      parameters: The tuned parameters.
      seed: The seed.
      task: The task.
      shards: The shards of the workers; leaves are [workers, examples, ...].
      times: When to log, float64[points]; the last one is the end.
    """
    method, period = setting["method"], parameters.get("period", 1)
    minibatches = parameters.get("minibatches", 1)
    steps, ends = timeline(
        method, setting["form"], setting["speeds"], link_of(task, method),
        seconds=times[-1], minibatches=minibatches, period=period, seed=seed,
    )  # fmt: skip
    # Gossip sums over mini-batches, and the others take their mean.
    rate = parameters["learning_rate"] / (minibatches if METHODS[method].mixing else 1)
    stops = np.searchsorted(ends, times, side="right")
    stops[-1] = max(1, stops[-1])
    kept = np.flatnonzero(np.diff(stops, prepend=0))
    options = jnp.float32(rate), jnp.int32(seed), jnp.int32(period)
    shards = jax.tree.map(jnp.asarray, shards)
    trained = program(task, method)(task.first_weights(seed), options, shards, steps, stops)
    params, last = jax.tree.map(lambda x: x[kept], trained), stops[kept] - 1
    unknown = np.full(len(last), np.nan)
    return Logged(params, last + 1, ends[last], unknown, unknown)
