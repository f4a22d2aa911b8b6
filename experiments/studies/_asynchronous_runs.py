"""Runs of asynchronous training, and of the synchronous program beside them, in processes.

Gradients are paced by sleeping, so that the workers of one machine do not compete for its cores.
"""

import contextlib
import functools
import importlib
import itertools
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import tyro

from experiments.tasks.task import Task
from jaxcomm import asynchronous, compression
from jaxcomm.asynchronous._messages import Job, Row
from jaxcomm.asynchronous._owner import Limits, Owner
from jaxcomm.asynchronous._replay import Replay
from jaxcomm.asynchronous._train import _cluster
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.synchronization import events

WORKERS, BATCH, PERIOD = 4, 32, 10
RATE, MOMENTUM = 0.02, 0.9
OUTER = optax.sgd(0.7, momentum=MOMENTUM, nesterov=True)

Method = Literal[
    "server", "server_aware", "bulk_synchronous", "stale_synchronous", "backup_workers",
    "decoupled",
    "decoupled_8_bits", "decoupled_4_bits", "decoupled_top_k", "synchronous",
]  # fmt: skip


def decoupled(codec: Any = None) -> events.Policy:
    return events.decoupled_diloco(optax.sgd(RATE), OUTER, PERIOD, quorum=2, grace=0.5, codec=codec)


POLICIES: dict[str, Callable[[], events.Policy]] = {
    "server": lambda: events.parameter_server(optax.sgd(RATE)),
    "server_aware": lambda: events.parameter_server(
        optax.sgd(WORKERS * RATE), weight=events.inverse_staleness
    ),
    "bulk_synchronous": lambda: events.bulk_synchronous(optax.sgd(WORKERS * RATE)),
    "stale_synchronous": lambda: events.stale_synchronous(optax.sgd(WORKERS * RATE), 3),
    "backup_workers": lambda: events.backup_workers(optax.sgd(WORKERS * RATE), 1),
    "decoupled": decoupled,
    "decoupled_8_bits": lambda: decoupled(compression.quantizers.dither(bits=8)),
    "decoupled_4_bits": lambda: decoupled(
        compression.blockwise(compression.quantizers.dither(bits=4), 64)
    ),
    "decoupled_top_k": lambda: decoupled(error_feedback(compression.sparsifiers.top_k(ratio=0.1))),
}


class Batches:
    """Batches of digits, each at least so many seconds after the one before in its process."""

    def __init__(self, task: Task, seconds: float, slow: Sequence[float] = ()) -> None:
        self.inputs, self.labels = task.dataset.train_inputs, task.dataset.train_labels
        self.seconds, self.slow, self.last = seconds, tuple(slow), 0.0

    def __call__(self, numbers: np.ndarray, worker: int) -> Any:
        each = self.seconds * (self.slow[worker] if self.slow else 1)
        if each:
            time.sleep(max(self.last + each - time.monotonic(), 0))
            self.last = max(self.last + each, time.monotonic() - each / 2)
        return self.inputs[numbers], self.labels[numbers]


class Timed(Batches):
    """The same; gradient k of worker i waits for `times[k, i]` seconds."""

    def __init__(self, task: Task, times: np.ndarray) -> None:
        super().__init__(task, 0.0)
        self.times, self.calls = times, 0

    def __call__(self, numbers: np.ndarray, worker: int) -> Any:
        time.sleep(float(self.times[self.calls, worker]))
        self.calls += 1
        return super().__call__(numbers, worker)


class Stopping(Batches):
    """The same; the process of worker 2 is stopped once, for 30 seconds."""

    calls = 0

    def __call__(self, numbers: np.ndarray, worker: int) -> Any:
        self.calls += 1
        if worker == 2 and self.calls == 100:
            subprocess.Popen(["sh", "-c", f"sleep 30; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().__call__(numbers, worker)


def given(method: str, seed: int, task: Task, pace: float, slow: Sequence[float] = ()) -> Any:
    """The arguments of a run of all methods but the synchronous one."""
    return (task.loss, task.first_weights(seed), Batches(task, pace, slow)), {
        "policy": POLICIES[method](),
        "workers": WORKERS,
        "examples": len(task.dataset.train_labels),
        "batch_size": BATCH,
        "seed": seed,
        "devices": 1,
    }


# A run, whose workers are killed.


def busy() -> tuple[float, float]:
    """`(busy, all)` core seconds of this machine so far."""
    times = psutil.cpu_times()
    total = times.user + times.nice + times.system + times.irq + times.softirq
    return total, total + times.idle + times.iowait


def victims(name: str) -> list[psutil.Process]:
    """The processes below this one with this in their command line."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(child.cmdline())
            if name in line and "jaxcomm.launch" not in line:  # The launcher survives.
                found.append(child)
    return sorted(found, key=lambda process: process.pid)


@contextlib.contextmanager
def killing(name: str, seconds: float, seed: int) -> Iterator[list[float]]:
    """Kills a random process with this in its command line, on average every so many seconds."""
    draw, done, times = random.Random(seed), threading.Event(), []
    started = time.monotonic()

    def run() -> None:
        while not done.wait(draw.expovariate(1 / seconds)):
            if found := victims(name):
                with contextlib.suppress(psutil.NoSuchProcess):
                    draw.choice(found).kill()
                    times.append(time.monotonic() - started)

    thread = threading.Thread(target=run, daemon=True)
    if seconds:
        thread.start()
    try:
        yield times
    finally:
        done.set()


def one(
    method: Method, output: pathlib.Path, /, deaths: float = 0.0, seconds: float = 300.0,
    seed: int = 0, pace: float = 0.05,
) -> None:  # fmt: skip
    """One run for so many seconds; `deaths` is the mean time between two of them."""
    task = Task("digits")
    before = busy()
    if method == "synchronous":
        rows, times = _synchronous(output, deaths, seconds, seed, pace)
    else:
        args, options = given(method, seed, task, pace)
        with killing("ray::WorkerProcess", deaths, seed + 100) as times:
            result = asynchronous.train(*args, **options, seconds=seconds, progress=False)
        rows = [row._asdict() for row in result.rows]
    now = busy()
    use = (now[0] - before[0]) / (now[1] - before[1])
    output.write_text(json.dumps({
        "method": method, "deaths": deaths, "seconds": seconds, "seed": seed, "pace": pace,
        "killed": times, "cpu": use, "rows": rows,
    }))  # fmt: skip


def _synchronous(
    output: pathlib.Path, deaths: float, seconds: float, seed: int, pace: float
) -> tuple[list[Any], list[float]]:
    folder, log = output.with_suffix(".checkpoints"), output.with_suffix(".log")
    command = [
        *(sys.executable, "-m", "jaxcomm.launch", "--processes", str(WORKERS)),
        *(
            "--restarts",
            "1000",
            "--grace",
            "0.1",
            "--",
            "-m",
            "experiments.studies._asynchronous_runs",
        ),
        *("worker", str(folder), str(log), "--seconds", str(seconds)),
        *("--seed", str(seed), "--pace", str(pace)),
    ]
    with killing("experiments.studies._asynchronous_runs worker", deaths, seed + 100) as times:
        process = subprocess.Popen(command)
        time.sleep(1)
        while not log.exists():
            time.sleep(0.05)
        # As of the others, the time begins with the first step.
        time.sleep(seconds)
        process.terminate()
        process.wait()
    return [json.loads(line) for line in log.read_text().splitlines()], times


def worker(
    folder: pathlib.Path, log: pathlib.Path, /, seconds: float, seed: int, pace: float
) -> None:
    """A process of the synchronous program, which goes on at its last checkpoint."""
    import jaxcomm
    from jaxcomm import launch
    from jaxcomm.checkpoint import Checkpoints

    launch.initialize()
    task = Task("digits")
    mesh = jax.make_mesh((WORKERS,), ("data",))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    tx = optax.chain(jaxcomm.mean(), optax.sgd(WORKERS * RATE))
    params = task.first_weights(seed)
    step = jaxcomm.make_step(task.loss, tx, mesh)
    state = {"params": params, "opt_state": jaxcomm.init(tx, params, mesh)}
    batches, first = Batches(task, pace), 0
    examples = len(task.dataset.train_labels)
    with Checkpoints(folder) as checkpoints:
        with contextlib.suppress(FileNotFoundError):
            first, state, _ = checkpoints.restore(state)
        for number in range(first, 10**9):
            order = np.random.default_rng((seed, number * WORKERS * BATCH // examples))
            start = number * WORKERS * BATCH % examples
            shuffled = np.resize(order.permutation(examples), 2 * examples)
            mine = shuffled[start + jax.process_index() * BATCH :][:BATCH]
            batch = jax.make_array_from_process_local_data(rows, batches(mine, 0))
            params, opt_state, metrics = step(state["params"], state["opt_state"], batch)
            state = {"params": params, "opt_state": opt_state}
            loss = float(metrics["loss"])
            if jax.process_index() == 0:
                with log.open("a") as file:
                    print(json.dumps({"step": number + 1, "time": time.time(), "loss": loss}),
                          file=file)  # fmt: skip
            if number % 8 == 7:
                checkpoints.save(number + 1, state)


def examples_of(run: dict[str, Any]) -> int:
    """The examples that a run has trained on and kept."""
    if run["method"] == "synchronous":
        return max(row["step"] for row in run["rows"]) * WORKERS * BATCH
    return sum(row["examples"] for row in run["rows"] if row["outcome"] == "used")


def replayed(run: dict[str, Any], task: Task, total: float) -> Any:
    """The parameters of a run after so many examples."""
    rows = [Row(**{**row, "heard": tuple(map(tuple, row["heard"]))}) for row in run["rows"]]
    args, options = given(run["method"], run["seed"], task, 0.0)
    return asynchronous.train(*args, **options, total=total, replay=rows).params


def train_loss(task: Task, params: Any) -> jax.Array:
    return _train_loss(task.model, params, task.dataset.train_inputs, task.dataset.train_labels)


@functools.partial(jax.jit, static_argnums=0)
def _train_loss(model: Any, params: Any, inputs: jax.Array, labels: jax.Array) -> jax.Array:
    logits = model.apply({"params": params}, inputs)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def losses_of(
    method: str, task: Task, rows: list[Row], every: int = 10
) -> list[tuple[float, float]]:
    """`(seconds, training loss)` of a run after each few messages, by a replay."""
    (loss, params, batches), options = given(method, 0, task, 0.0)
    given_once = loss, batches, options["policy"], WORKERS, 0, BATCH, 1, False, None
    job = Job(*given_once, options["examples"])
    return replayed_losses(job, params, rows, every, functools.partial(train_loss, task))


def replayed_losses(
    job: Job, params: Any, rows: list[Row], every: int, loss: Callable[[Any], Any]
) -> list[tuple[float, float]]:
    """`(seconds, loss)` of a run with an owner after each few messages."""
    limits, found = Limits(math.inf, math.inf, WORKERS, math.inf), list[tuple[float, float]]()
    count = itertools.count(1)

    def note(row: Row) -> None:
        if row.kind == "arrived" and next(count) % every == 0:
            found.append((row.seconds, float(loss(owner.model))))

    owner = Owner(job, jax.tree.map(np.asarray, params), limits, Replay(job, rows), on_row=note)
    owner.run()
    return found


def first_below(losses: list[tuple[float, float]], target: float) -> float | None:
    """The time of the first loss below a target."""
    return next((seconds for seconds, loss in losses if loss < target), None)


# What costs nothing.


def half_square(params: Any, batch: Any) -> jax.Array:
    return jnp.vdot(params, params) / 2 + 0 * jnp.mean(batch)


def no_batch(numbers: np.ndarray, worker: int) -> Any:
    return np.zeros(len(numbers), np.float32)


@contextlib.contextmanager
def local_ray() -> Iterator[None]:
    with _cluster(importlib.import_module("ray"), WORKERS):
        yield


class Echo:
    """An actor that receives an array, and returns another of its size."""

    def __init__(self, size: int) -> None:
        self.array = np.zeros(size, np.float32)

    def call(self, array: np.ndarray | None) -> np.ndarray | None:
        return None if array is None else self.array + 1


def bare_calls(ray: Any, array: np.ndarray, count: int) -> dict[str, float]:
    """The median milliseconds of a call without arrays, and with one there and one back."""
    actor = ray.remote(Echo).remote(array.size)
    found = {}
    for name, value in (("ms_of_nothing", None), ("ms_of_arrays", array)):
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            reference = actor.call.remote(value)
            ray.wait([reference])
            ray.get(reference)
            times.append(time.perf_counter() - begin)
        found[name] = 1e3 * float(np.median(times[5:]))
    return found


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"one": one, "worker": worker})
