"""Training over windows on the wall clock, by several processes."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcomm
from experiments.tasks.task import Task
from jaxcomm import synchronization
from jaxcomm.synchronization import RealTimeWindow


class Run(NamedTuple):
    """The results of one run, one entry per logged window."""

    seconds: list[float]  # on the clock
    params: list[Any]
    minibatches: int  # over all workers


class Timings(NamedTuple):
    """Measured times of a run."""

    minibatch: np.ndarray  # [workers], median seconds
    exchange: (
        float  # median over windows of the minimum over workers: the last worker does not wait
    )


def worker_batches(task: Task, worker: int, workers: int, size: int, seed: int) -> Iterator[Any]:
    """Infinite mini-batches of a worker, from its shard of the training set."""
    inputs, labels = task.dataset.train_inputs, task.dataset.train_labels
    local = np.random.default_rng(seed).permutation(len(inputs))[worker::workers]
    rng = np.random.default_rng([seed, worker])
    waiting = np.empty(0, np.int64)
    while True:
        while len(waiting) < size:
            waiting = np.concatenate([waiting, rng.permutation(local)])
        rows, waiting = waiting[:size], waiting[size:]
        yield inputs[rows], labels[rows]


def slow_batches(
    batches: Iterator[Any], seconds: float, extra: float, work: Callable[[Any], Any]
) -> Iterator[Any]:
    """Mini-batches, each after `extra` seconds of `work` and `seconds` of sleep."""
    for batch in batches:
        end = time.perf_counter() + extra
        while time.perf_counter() < end:
            work(batch)
        time.sleep(seconds)
        yield batch


def make_transformation(config: Any) -> optax.GradientTransformation:
    """The transformation of both strategies."""
    return optax.chain(jaxcomm.mean(), optax.sgd(config.learning_rate))


def gather(mesh: Mesh, local: np.ndarray) -> np.ndarray:
    """The arrays of all processes, [processes, ...], on each process."""
    global_array = jax.make_array_from_process_local_data(
        NamedSharding(mesh, PartitionSpec("data")), np.asarray(local, np.float32)[None]
    )
    copied = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(global_array)
    return np.asarray(copied.addressable_data(0), np.float64)


class RealTimeTrainer:
    """Trains over windows of one length in real time. The first window compiles."""

    def __init__(self, task: Task, mesh: Mesh, config: Any, seconds: float):
        """Builds the step and the window without compiling them."""
        self._task, self._mesh, self._config = task, mesh, config
        self._tx = make_transformation(config)
        step = jaxcomm.make_step(
            task.loss, self._tx, mesh, gradients=synchronization.precomputed_gradients
        )
        self._window = RealTimeWindow(
            task.loss, step, mesh, seconds=seconds, minibatches=config.minibatches
        )
        self._work = jax.jit(jax.grad(task.loss))

    def run(self, seed: int, windows: int) -> tuple[Run, Timings]:
        """Trains once on all processes."""
        task, config, me = self._task, self._config, jax.process_index()
        extra = (
            (config.slowdown - 1) * config.minibatch_seconds if me == self._mesh.size - 1 else 0.0
        )
        weights = jax.device_get(task.first_weights(seed))
        batches = worker_batches(task, me, self._mesh.size, config.minibatch_size, seed)
        work = lambda batch: jax.block_until_ready(self._work(weights, batch))  # noqa: E731
        queue = slow_batches(batches, config.minibatch_seconds, extra, work)
        params, state = weights, jaxcomm.init(self._tx, weights, self._mesh)
        seconds, logged, paces, exchanges, finished = [], [], [], [], 0
        gather(self._mesh, np.zeros(1))  # A barrier.
        self._window.restart()
        began = time.perf_counter()
        for number in range(1, windows + 1):
            closed = self._window(params, state, [queue])
            params, state = closed.params, closed.opt_state
            paces.append(self._window.minibatch_seconds)
            exchanges.append(closed.metrics["exchange_seconds"])
            finished += int(closed.metrics["weight"])
            if number % config.log_every == 0:
                seconds.append(time.perf_counter() - began)
                logged.append(jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), params))
        each = gather(self._mesh, np.asarray([np.median(paces), *exchanges]))
        speeds = Timings(each[:, 0], float(np.median(each[:, 1:].min(axis=0))))
        return Run(seconds, logged, finished), speeds
