"""Runs of the policies of the event engine, on the clocks and mini-batches of the windows."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.methods.policies import STRATEGIES, Strategy, Wire
from experiments.methods.stragglers import SPEEDS, WORKERS
from experiments.tasks.task import Task
from experiments.training.logged import Logged, Training
from experiments.training.window_runs import link_of
from jaxcomm import synchronization
from jaxcomm.synchronization import Straggler, events
from jaxcomm.synchronization.events import Event
from jaxcomm.synchronization.events._engine import EventLoop, Progress

LENGTH = 4096  # The mini-batches of a worker after which times and batches repeat.
ROWS = 64  # Shards are padded to multiples of it, so that trials and runs share compiled programs.


class Inputs(NamedTuple):
    """What a compiled program is given: rates, seeds, clocks and data share one."""

    rate: Any  # float32[]
    seed: Any  # int32[]
    seconds: Any  # float32[LENGTH, workers], of each mini-batch
    examples: Any  # int32[LENGTH, workers, batch], of each mini-batch
    shards: Any  # leaves [workers, rows, ...], padded
    each: Any  # int32[], the examples of a shard, without the padding
    wire: Wire


class State(NamedTuple):
    """The state between two logged times."""

    progress: Progress
    changed: jax.Array  # float32[], when the parameters last changed
    uploads: jax.Array  # int32[], messages so far
    staleness: jax.Array  # float32[], the sum over events


@functools.lru_cache(maxsize=64)
def times_of(speeds: str, minibatch_seconds: float, seed: int) -> jax.Array:
    """The seconds of each mini-batch, float32[LENGTH, workers]: those of the windows."""
    straggler = SPEEDS[speeds].straggler(minibatch_seconds)

    def of_number(number: jax.Array) -> jax.Array:
        return straggler.sample(jax.random.key(seed), number, (WORKERS, 1))[:, 0]

    return jax.vmap(of_number)(jnp.arange(LENGTH, dtype=jnp.int32))


@functools.lru_cache(maxsize=64)
def examples_of(each: int, minibatch_size: int, seed: int) -> jax.Array:
    """The examples of each mini-batch, int32[LENGTH, workers, batch]: those of the windows."""
    places = jnp.broadcast_to(jnp.arange(each, dtype=jnp.int32), (WORKERS, each))
    dealt = synchronization.window_batches(
        jax.random.key(seed),
        places,
        jnp.zeros(WORKERS, jnp.int32),
        minibatches=LENGTH,
        batch_size=minibatch_size,
    )
    return jnp.swapaxes(dealt.reshape(WORKERS, LENGTH, minibatch_size), 0, 1)


def bytes_of(tree: Any) -> int:
    """The bytes of all leaves."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _loss_of_first(params: Any, task: Task, shard: Any, count: jax.Array) -> jax.Array:
    """The mean loss of the first `count` examples of a shard."""
    examples = jax.tree.map(lambda x: x[:, None], shard)
    losses = jax.vmap(lambda example: task.loss(params, example))(examples)
    wanted = jnp.arange(len(losses), dtype=jnp.int32) < count
    return jnp.sum(jnp.where(wanted, losses, 0.0)) / count.astype(jnp.float32)


class Program:
    """The compiled events of a policy, for all rates, seeds, clocks and data."""

    def __init__(self, task: Task, strategy: Strategy, own: Mapping[str, Any]):
        """Compiles nothing.

        Args:
          task: The task.
          strategy: The strategy.
          own: Its tuned parameters but the learning rate. `minibatches` are those of a gradient, by
            default one; all others are options of the policy.
        """
        self._task, self._strategy = task, strategy
        self._minibatches = own.get("minibatches", 1)
        self._options = {name: value for name, value in own.items() if name != "minibatches"}
        self._start = jax.jit(self._begin)
        self._advance = jax.jit(self._until, donate_argnums=0)

    def _loop(self, inputs: Inputs) -> EventLoop:
        span = self._minibatches * self._strategy.evaluations

        def numbers(first: jax.Array, count: int) -> jax.Array:
            return (first * count + jnp.arange(count, dtype=jnp.int32)) % LENGTH

        def draw(key: jax.Array, number: jax.Array, shape: tuple[int, int]) -> jax.Array:
            return jnp.sum(inputs.seconds[numbers(number, span)], axis=0).reshape(shape)

        def scaled(loss_and_gradient: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            loss, gradient = loss_and_gradient
            return loss, jax.tree.map(lambda x: inputs.rate * x, gradient)

        def work(params: Any, event: Event) -> tuple[jax.Array, Any]:
            rows = inputs.examples[numbers(event.number, self._minibatches), event.worker].ravel()
            batch = jax.tree.map(lambda x: x[event.worker, rows], inputs.shards)
            return scaled(jax.value_and_grad(self._task.loss)(params, batch))

        def full(params: Any, event: Event) -> tuple[jax.Array, Any]:
            shard = jax.tree.map(lambda x: x[event.worker], inputs.shards)
            return scaled(
                jax.value_and_grad(_loss_of_first)(params, self._task, shard, inputs.each)
            )

        return events.event_loop(
            self._strategy.build(full, **self._options),
            work,
            Straggler(draw, lambda workers: np.ones(workers), None),
            workers=WORKERS,
            communication_seconds=lambda sent: self._strategy.travel(inputs.wire, sent),
            seed=inputs.seed,
        )

    def _begin(self, weights: Any, inputs: Inputs) -> State:
        progress = self._loop(inputs).start(weights)
        return State(progress, jnp.float32(0), jnp.int32(0), jnp.float32(0))

    def _until(self, state: State, inputs: Inputs, stop: jax.Array) -> tuple[State, Any]:
        loop = self._loop(inputs)

        def goes_on(state: State) -> jax.Array:
            due = jnp.where(state.progress.idle, jnp.inf, state.progress.due.high)
            return jnp.min(due) <= stop

        def take(state: State) -> State:
            before = loop.model(state.progress)
            progress, record = loop.run(state.progress, 1)
            differs = jax.tree.map(lambda x, y: jnp.any(x != y), before, loop.model(progress))
            changes = jnp.any(jnp.stack(jax.tree.leaves(differs)))
            arrived = progress.arrived.high[record.worker[0]]
            return State(
                progress=progress,
                changed=jnp.where(changes, arrived, state.changed),
                uploads=state.uploads + record.sent.uploads[0],
                staleness=state.staleness + record.staleness[0].astype(jnp.float32),
            )

        state = jax.lax.while_loop(goes_on, take, state)
        return state, loop.model(state.progress)

    def train(self, weights: Any, inputs: Inputs, logged: np.ndarray) -> Iterator[Logged]:
        """Trains once; yields the last state before each time, if it has changed, and the last."""
        size = bytes_of(weights)
        ordinary = inputs.wire._replace(rest_of_shard=0.0)
        exchange = float(self._strategy.travel(ordinary, events.sent(1, size, 1, size)))
        state, before = self._start(weights, inputs), 0.0
        for place, time in enumerate(logged, 1):
            # The messages of an event count, too, as the exchange of a window does.
            state, params = self._advance(state, inputs, jnp.float32(time - exchange))
            count, changed = int(state.progress.events), float(state.changed)
            if changed > before or place == len(logged):
                yield Logged(
                    params,
                    step=count,
                    seconds=changed,
                    clock=float(jnp.max(state.progress.arrived.high)),
                    finished=int(state.progress.finished.sum())
                    * self._minibatches
                    * self._strategy.evaluations,
                    staleness=float(state.staleness) / max(count, 1),
                    uploads=int(state.uploads) / max(count, 1),
                )
            before = changed


_PROGRAMS: dict[tuple, Program] = {}


def _program(task: Task, method: str, own: tuple[tuple[str, Any], ...]) -> Program:
    """Tasks that differ only in the data share a program."""
    key = task.model, task.loss_of, method, own
    if key not in _PROGRAMS:
        _PROGRAMS[key] = Program(task, STRATEGIES[method], dict(own))
    return _PROGRAMS[key]


def run(training: Training) -> Iterator[Logged]:
    """Trains; yields the states at the logged times."""
    config, setting, seed = training.config, training.setting, training.seed
    strategy, task, speeds = STRATEGIES[setting["method"]], training.task, setting["speeds"]
    own = {name: x for name, x in training.parameters.items() if name != "learning_rate"}
    weights = task.first_weights(seed)
    each = jax.tree.leaves(training.shards)[0].shape[1]
    padding = -each % ROWS
    shards = jax.tree.map(
        lambda x: jnp.pad(jnp.asarray(x), [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)),
        training.shards,
    )
    means = SPEEDS[speeds].straggler(config.minibatch_seconds).means(WORKERS)
    rest = max(0.0, each / config.minibatch_size - strategy.evaluations) * float(means.max())
    link = link_of(task, "all_reduce", config.bandwidth, config.latency)
    inputs = Inputs(
        rate=jnp.float32(training.parameters["learning_rate"] * strategy.scale(own)),
        seed=jnp.int32(seed),
        seconds=times_of(speeds, config.minibatch_seconds, seed),
        examples=examples_of(each, config.minibatch_size, seed),
        shards=shards,
        each=jnp.int32(each),
        wire=Wire(config.bandwidth, config.latency, link.all_reduce, bytes_of(weights), rest),
    )
    program = _program(task, setting["method"], tuple(sorted(own.items())))
    return program.train(weights, inputs, training.logged)
