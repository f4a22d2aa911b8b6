"""The runs of `pace`: both strategies on the wall clock, and on a simulated clock."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

import jaxcomm
from experiments.cli.errors import ExperimentError
from experiments.tasks.task import Task
from experiments.training import cluster
from experiments.training.real_time import (
    RealTimeTrainer,
    Run,
    Timings,
    make_transformation,
    worker_batches,
)
from jaxcomm import synchronization

SYNCHRONOUS, NON_BLOCKING = "synchronous", "non_blocking"
WALL, SIMULATED = "wall", "simulated"
WARM_UP, WARM_UP_SEED = 4, 1000
WINDOWS_FACTOR = 2  # Windows of a non-blocking run over those of a synchronous run.


def simulate_run(
    task: Task, config: Any, seconds: float, speeds: Timings, seed: int, count: int
) -> Run:
    """Trains on the same batches on a simulated clock, in windows of at most `seconds`."""
    workers, maximum, tx = len(speeds.minibatch), config.minibatches, make_transformation(config)
    params = task.first_weights(seed)
    state = jaxcomm.init(tx, params, workers)
    step = jaxcomm.simulate(task.loss, tx, workers, gradients=synchronization.window_gradients)
    clock, close = synchronization.windows(
        synchronization.deterministic(speeds.minibatch.tolist()),
        synchronization.all_workers() if math.isinf(seconds) else synchronization.deadline(seconds),
        workers=workers,
        minibatches=maximum,
        communication_seconds=speeds.exchange,
        in_flight="abort",
    )
    queues = [
        worker_batches(task, worker, workers, config.minibatch_size, seed)
        for worker in range(workers)
    ]
    unused = next(worker_batches(task, 0, workers, config.minibatch_size, seed))
    seconds, logged = [], []
    for number in range(1, count + 1):
        window, clock = close(clock)
        minibatches_of_workers = []
        for queue, finished in zip(queues, np.asarray(window.finished), strict=True):
            minibatches_of_workers += [*itertools.islice(queue, int(finished))]
            minibatches_of_workers += [unused] * (maximum - int(finished))
        batch = jax.tree.map(lambda *each: np.stack(each), *minibatches_of_workers)
        params, state, _ = step(params, state, (batch, window.finished))
        if number % config.log_every == 0:
            seconds.append(float(clock.seconds))
            logged.append(jax.device_get(params))
    return Run(seconds, logged, int(clock.minibatches))


def settings(config: Any) -> list[dict[str, str]]:
    """Both strategies on the wall clock, and then on the simulated clock.

    Raises:
      ExperimentError: If this process is not one of several with one device each.
    """
    if not config.distributed:
        raise ExperimentError(
            "pace requires several processes: python -m experiments launch --processes 4 -- pace."
        )
    if jax.local_device_count() != 1 or jax.process_count() < 2:
        raise ExperimentError("pace requires at least two processes with one device each.")
    return [
        {"clock": clock, "strategy": strategy}
        for clock in (WALL, SIMULATED)
        for strategy in (SYNCHRONOUS, NON_BLOCKING)
    ]


def inputs(
    config: Any, rows: Sequence[Mapping[str, Any]], setting: Mapping[str, str], seed: int
) -> dict[str, Any]:
    """The measured times that a run depends on.

    The deadline follows from the mini-batches of the first synchronous run. The simulated clock has
    the times of both runs of the seed on the wall clock.

    Raises:
      ExperimentError: If the rows are of another number of processes.
    """
    measured = [row for row in rows if row["kind"] == "run" and row["clock"] == WALL]
    if not measured:
        return {}
    workers, found = len(measured[0]["minibatch_seconds"]), {}
    if workers != jax.process_count():
        raise ExperimentError(
            f"The record is of {workers} processes, got {jax.process_count()}. Use --processes "
            f"{workers} of `launch`, or begin a new record."
        )
    if setting["strategy"] == NON_BLOCKING:
        fastest = min(measured[0]["minibatch_seconds"])
        found["deadline"] = config.deadline_slack * config.minibatches * fastest
    if setting["clock"] == SIMULATED:
        of_seed = [row for row in measured if row["seed"] == seed]
        for name in ("minibatch_seconds", "exchange_seconds"):
            found[name] = np.mean([row[name] for row in of_seed], axis=0).tolist()
    return found


def _rows(task: Task, config: Any, run: Run) -> Iterator[dict[str, Any]]:
    """The logged points of a run, and its end."""
    losses = [task.train_score(params)[0] for params in run.params]
    for seconds, loss in zip(run.seconds, losses, strict=True):
        yield {"seconds": seconds, "train_loss": loss}
    reached = [
        seconds for seconds, loss in zip(run.seconds, losses, strict=True) if loss <= config.loss
    ]
    yield {
        "seconds_to_loss": min(reached, default=math.nan),
        "seconds": run.seconds[-1],
        "minibatches": run.minibatches,
        "train_loss": losses[-1],
        "test_accuracy": task.test_score(run.params[-1])[1],
    }


def train(config: Any, setting: Mapping[str, str]) -> Callable[..., Iterator[Mapping[str, Any]]]:
    """The trainer of both strategies on one clock. Only the first process has the values."""
    task, is_main = Task("digits"), cluster.is_main_process()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

    @functools.cache
    def warm_trainer(seconds: float) -> RealTimeTrainer:
        trainer = RealTimeTrainer(task, mesh, config, seconds)
        trainer.run(WARM_UP_SEED, WARM_UP)
        return trainer

    def trainer(
        setting: Mapping[str, str], seed: int, parameters: Mapping[str, Any], **_: Any
    ) -> Iterator[Mapping[str, Any]]:
        seconds = parameters.get("deadline", math.inf)
        count = config.windows * (WINDOWS_FACTOR if setting["strategy"] == NON_BLOCKING else 1)
        measured: dict[str, Any] = {}
        if setting["clock"] == WALL:
            run, speeds = warm_trainer(seconds).run(seed, count)
            measured = {
                "minibatch_seconds": speeds.minibatch.tolist(),
                "exchange_seconds": speeds.exchange,
            }
        elif is_main:
            times = np.array(parameters["minibatch_seconds"]), parameters["exchange_seconds"]
            run = simulate_run(task, config, seconds, Timings(*times), seed, count)
        if not is_main:
            yield {}
            return
        *points, end = _rows(task, config, run)
        yield from points
        yield {**end, **measured}

    return trainer
