"""Asynchronous training on Ray: failures, slow workers, the simulated clock, and what it costs."""

import dataclasses
import importlib
import itertools
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats

from experiments.lab.network import isolate
from experiments.studies import _asynchronous_link as _link
from experiments.studies import _asynchronous_runs as runs
from experiments.studies._windows import with_delay
from experiments.study.run import Command
from experiments.tasks.task import Task
from jaxcomm import asynchronous, compression, synchronization
from jaxcomm._noise import make_key
from jaxcomm.synchronization import deterministic, events

SLOW = (1.0, 1.0, 1.0, 4.0)
ALL = ("server", "server_aware", "stale_synchronous", "backup_workers", "decoupled")
BANDWIDTH, MILLISECONDS = "200mbit", 20.0  # of the link of each worker, and there and back
TARGET = 0.1  # training loss
METHODS = ("server", "bulk_synchronous", "stale_synchronous", "backup_workers", "decoupled")
# Those of the study of stragglers, ten times as slow, so that other work takes a small part.
CLOCKS = {
    "3:1": deterministic([0.1, 0.1, 0.3, 0.3]),
    "exponential": synchronization.shifted_exponential(mean=0.1),
    "pareto": synchronization.pareto(scale=0.1 / 3, shape=1.5),
}
# Seconds of a gradient, so that two runs use at most 60 % of two cores.
PACES = {"server": 0.1, "decoupled": 0.05, "synchronous": 0.1}


@dataclasses.dataclass(frozen=True)
class Options:
    """Measures asynchronous training on processes of Ray on this machine.

    Question: how much work is done while workers die, does anybody wait for slow ones, does the
    event engine predict it, and what does an arrival cost?

    Command: `python -m experiments asynchronous --what goodput`.

    Expected time: goodput 70 minutes, speeds and link 25 minutes, the others 10 minutes each.

    Number: the share of the examples without deaths; the waits; predicted over measured seconds;
    updates a second.
    """

    folder: pathlib.Path = pathlib.Path("asynchronous")
    """the folder of the rows and tables"""
    what: Literal["goodput", "stragglers", "clock", "speeds", "link", "overhead"] = "goodput"
    """what is measured"""
    methods: tuple[runs.Method, ...] = ()
    """the methods, by default those of the record"""
    seconds: float = 300.0
    """of a run of goodput"""
    deaths: float = 20.0
    """the mean seconds between two deaths, of goodput"""
    seeds: int = 5
    """of goodput"""


def goodput(config: Options) -> Iterator[dict[str, Any]]:
    """The work done with deaths and without, and the test loss after equally many examples.

    Both runs of a pair are at the same time, but not those of the synchronous program, whose
    restarts use more than half of two cores.
    """
    task = Task("digits")
    methods = config.methods or ("server", "decoupled", "synchronous")
    for seed, method in itertools.product(range(config.seeds), methods):
        paths = {
            each: config.folder / f"{method}_{seed}_{each:g}.json" for each in (0.0, config.deaths)
        }
        started = []
        for each, path in paths.items():
            if not path.exists():
                command = [
                    *(sys.executable, "-m", runs.__name__, "one", method, str(path)),
                    *("--deaths", str(each), "--seconds", str(config.seconds)),
                    *("--seed", str(seed), "--pace", str(PACES[method])),
                ]
                quiet = subprocess.DEVNULL
                started.append(subprocess.Popen(command, stdout=quiet, stderr=quiet))
                if method == "synchronous":
                    started[-1].wait()
        for process in started:
            process.wait()
        pair = [json.loads(path.read_text()) for path in paths.values()]
        counts = [runs.examples_of(run) for run in pair]
        row = {
            "method": method, "seed": seed, "examples": counts, "share": counts[1] / counts[0],
            "killed": len(pair[1]["killed"]), "cpu": [run["cpu"] for run in pair],
        }  # fmt: skip
        if method != "synchronous":
            ends = [runs.replayed(run, task, min(counts)) for run in pair]
            test = [task.test_score(params)[0] for params in ends]
            training = [float(runs.train_loss(task, params)) for params in ends]
            row |= {"test": test, "ratio": test[1] / test[0]}
            row |= {"training": training, "training_ratio": training[1] / training[0]}
        yield row


def interval(values: list[float]) -> tuple[float, float, float]:
    """The mean, and its 95 % interval by Student's t."""
    mean, error = np.mean(values), scipy.stats.sem(values)
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * error
    return float(mean), float(mean - half), float(mean + half)


def stragglers(config: Options) -> Iterator[dict[str, Any]]:
    """The longest waits, if worker 3 is four times as slow and worker 2 is stopped for 30 s."""
    task, pace = Task("digits"), 0.1
    for method in config.methods or ALL:
        (loss, params, _), options = runs.given(method, 0, task, pace)
        result = asynchronous.train(
            loss, params, runs.Stopping(task, pace, SLOW), **options, seconds=60.0, progress=False,
            patience=1e6,
        )  # fmt: skip
        waits = {}
        for worker in range(runs.WORKERS):
            arrivals = [r for r in result.rows if r.kind == "arrived" and r.worker == worker]
            between = np.diff([row.seconds for row in arrivals])
            computed = np.array([row.work_seconds for row in arrivals[1:]])
            waits[worker] = float(np.max(between - computed, initial=0.0))
        yield {
            "method": method, "step": pace, "longest_waits": waits,
            "longest_work": max(row.work_seconds for row in result.rows),
            "used": result.summary.used,
        }  # fmt: skip


def clock(config: Options) -> Iterator[dict[str, Any]]:
    """The time to a training loss: measured, and predicted from the seconds of steps."""
    task, pace = Task("digits"), 0.1
    for method in config.methods or ALL:
        args, options = runs.given(method, 0, task, pace, SLOW)
        result = asynchronous.train(*args, **options, seconds=90.0, progress=False)
        measured = runs.losses_of(
            method, task, result.rows, every=1 if "decoupled" in method else 10
        )
        gradients = runs.PERIOD if method.startswith("decoupled") else 1
        arrived = [
            [r for r in result.rows if r.kind == "arrived" and r.worker == worker][2:]
            for worker in range(runs.WORKERS)
        ]
        each = [float(np.mean([r.work_seconds for r in rows])) / gradients for rows in arrived]
        # The slowest worker waits for no other: the rest of its time is its messages'.
        between = float(np.mean(np.diff([row.seconds for row in arrived[-1]])))
        message = max(between - each[-1] * gradients, 0.0)
        predicted = _predicted(task, options["policy"], args[1], deterministic(each), message)
        # The first work of each worker compiles, which the engine does not know of.
        firsts = [
            next(r.seconds for r in result.rows if r.number and r.worker == w) for w in (0, 1, 2)
        ]
        start = float(np.median(firsts)) - 2 * gradients * float(np.median(each)) - message
        ratios = {}
        for target in (1.0, 0.5, 0.3):
            times = runs.first_below(measured, target), runs.first_below(predicted, target)
            if None not in times:
                ratios[target] = times[1] / (times[0] - start)
        (config.folder / f"{method}.json").write_text(json.dumps({
            "measured": measured, "predicted": predicted, "start": start,
            "rows": [row._asdict() for row in result.rows],
        }))  # fmt: skip
        yield {
            "method": method, "step_seconds": each, "message_seconds": message, "start": start,
            "predicted_over_measured": ratios,
        }  # fmt: skip


def speeds(config: Options) -> Iterator[dict[str, Any]]:
    """The time to a training loss over that of synchronous SGD, measured and simulated.

    The times of gradients are drawn from the same model, and equal in both.
    """
    task = Task("digits")
    for name, straggler in CLOCKS.items():
        numbers = jnp.arange(1000, dtype=jnp.int32)
        draw = jax.vmap(lambda k, x=straggler: x.sample(make_key(0), k, (runs.WORKERS, 1))[:, 0])
        times, losses, message = np.asarray(draw(numbers)), {}, None
        for method in config.methods or METHODS:
            (loss, params, _), options = runs.given(method, 0, task, 0.0)
            result = asynchronous.train(
                loss, params, runs.Timed(task, times), **options, seconds=75.0, progress=False,
                patience=1e6,
            )  # fmt: skip
            gradients = runs.PERIOD if method.startswith("decoupled") else 1
            more: dict[bool, list[float]] = {True: [], False: []}  # whether it is the first work
            for row in result.rows:
                if row.kind == "arrived":
                    drawn = times[row.number : row.number + gradients, row.worker].sum()
                    more[row.number == 0].append(row.work_seconds - drawn)
            extra = float(np.median(more[False])) / gradients
            # That of a worker that waits for no other.
            message = _message_seconds(result.rows) if message is None else message
            # As in the engine, the time begins when all have compiled, with their first work.
            begun = max(row.seconds for row in result.rows if row.kind == "joined")
            begun += float(np.median(more[True])) - extra * gradients
            measured = runs.losses_of(method, task, result.rows, every=4 // min(gradients, 4))
            slower = with_delay(straggler, deterministic([extra] * runs.WORKERS))
            losses[method] = (
                [(seconds - begun, loss) for seconds, loss in measured],
                _predicted(task, options["policy"], params, slower, message),
            )
            (config.folder / f"speeds_{name.replace(':', '_')}_{method}.json").write_text(
                json.dumps(losses[method])
            )
            yield {"speeds": name, "method": method, "extra": extra, "message": message} | {
                str(target): [runs.first_below(found, target) for found in losses[method]]
                for target in (1.0, 0.5, 0.3)
            }


def _message_seconds(rows: list[asynchronous.Row]) -> float:
    """The median time of a worker from the end of its work to the arrival, and of a reply."""
    found: list[float] = []
    for worker in range(runs.WORKERS):
        arrived = [row for row in rows if row.kind == "arrived" and row.worker == worker][1:]
        between = np.diff([row.seconds for row in arrived])
        found.extend(between - [row.work_seconds for row in arrived[1:]])
    return float(np.median(found))


def _predicted(
    task: Task, policy: events.Policy, params: Any, straggler: Any, message: float
) -> list[tuple[float, float]]:
    """`(seconds, training loss)` of the event engine."""
    inputs, labels = (
        jnp.asarray(x) for x in (task.dataset.train_inputs, task.dataset.train_labels)
    )

    def work(params: Any, event: events.Task) -> Any:
        rows = jax.random.randint(event.key, (runs.BATCH,), 0, len(labels))
        return jax.value_and_grad(task.loss)(params, (inputs[rows], labels[rows]))

    loop = events.event_loop(
        policy, work, straggler, workers=runs.WORKERS,
        communication_seconds=lambda sent: jnp.where(sent.uploads > 0, jnp.float32(message), 0.0),
    )  # fmt: skip
    run, progress, found = jax.jit(loop.run, static_argnums=1), loop.start(params), []
    while not found or found[-1][0] < 90:
        progress, records = run(progress, 10)
        loss = runs.train_loss(task, loop.model(progress))
        found.append((float(records.seconds[-1]), float(loss)))
    return found


def link(config: Options) -> Iterator[dict[str, Any]]:
    """The time to a training loss over slow links, of each method at the best of its rates.

    All have the same grid, which is extended where its edge is the best.
    """
    network = _link.network_of(BANDWIDTH, MILLISECONDS)
    for method in ("synchronous", *_link.POLICIES):
        found: dict[float, float] = {}
        waiting = [0.02, 0.04, 0.08]
        while waiting:
            rate = waiting.pop()
            path = config.folder / f"link_{method}_{rate:g}.json"
            if not path.exists():
                _link.run(network, method, rate, 45.0, path)
            losses = (run := json.loads(path.read_text())).pop("losses")
            times = {str(x): runs.first_below(losses, x) for x in (1.0, 0.3, TARGET)}
            found[rate] = times[str(TARGET)] or np.inf
            yield {"method": method, "rate": rate, "seconds": times} | run
            best = min(found, key=lambda rate: found[rate])
            if not waiting and len(found) < 6 and best in (min(found), max(found)):
                waiting.append(best * 2 if best == max(found) else best / 2)


def overhead(config: Options) -> Iterator[dict[str, Any]]:
    """Updates a second of an asynchronous server whose gradients cost little, and Ray's calls."""
    ray = importlib.import_module("ray")
    for size in (5_410, 10_000_000):
        count = 400 if size < 10**6 else 60
        array = np.random.default_rng(0).normal(size=size).astype(np.float32)
        with runs.local_ray():
            yield {"what": "a bare call of Ray", "size": size} | runs.bare_calls(ray, array, count)
        for bits, workers in itertools.product((None, 8), (1, 2)):
            codec = bits and compression.quantizers.dither(bits=bits)
            result = asynchronous.train(
                runs.half_square, array, runs.no_batch, workers=workers, examples=64, batch_size=1,
                policy=events.parameter_server(optax.sgd(0.1), codec=codec or None),
                devices=1, total=count * workers, progress=False,
            )  # fmt: skip
            arrived = [row for row in result.rows if row.kind == "arrived"][5 * workers :]
            yield {
                "what": "updates", "size": size, "bits": bits or 32, "workers": workers,
                "per_second": (len(arrived) - 1) / (arrived[-1].seconds - arrived[0].seconds),
                "ms_of_work": 1e3 * float(np.median([row.work_seconds for row in arrived])),
                "upload_bytes": arrived[-1].upload_bytes,
                "download_bytes": arrived[-1].download_bytes,
            }  # fmt: skip


MEASUREMENTS: dict[str, Callable[[Options], Iterator[dict[str, Any]]]] = {
    "goodput": goodput,
    "stragglers": stragglers,
    "clock": clock,
    "speeds": speeds,
    "link": link,
    "overhead": overhead,
}


def main(config: Options) -> int:
    """Runs `python -m experiments asynchronous`; returns the exit code."""
    if config.what == "link":
        isolate()
    config.folder.mkdir(parents=True, exist_ok=True)
    table = []
    for row in MEASUREMENTS[config.what](config):
        table.append(row)
        print(json.dumps(row), flush=True)
    (config.folder / f"{config.what}.json").write_text(json.dumps(table, indent=1) + "\n")
    for method, name in itertools.product(runs.POLICIES, ("share", "ratio", "training_ratio")):
        values = [row[name] for row in table if row.get("method") == method and name in row]
        if len(values) > 1:
            print(method, name, "mean and 95 % interval", *interval(values))
    return 0


ASYNCHRONOUS = Command(Options, main)
