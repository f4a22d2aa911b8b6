"""Synchronous and Non-blocking SGD on the wall clock and on the simulated clock."""

import inspect
import math
import statistics
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType

from experiments.cli.configs import Pace
from experiments.cli.errors import ExperimentError
from experiments.cli.progress import Progress
from experiments.study.record import describe_command, open_record
from experiments.study.table import column, sd, to_csv, to_markdown, to_rich
from experiments.tasks.task import Task
from experiments.training import cluster
from experiments.training.real_time import RealTimeTrainer, Run, Timings, simulate_run
from jaxcomm.synchronization import all_workers, deadline, deterministic

SYNCHRONOUS, NON_BLOCKING = "synchronous", "non_blocking"
WARM_UP, WARM_UP_SEED = 4, 1000
WINDOWS_FACTOR = 2  # Windows of a non-blocking run over those of a synchronous run.
TOLERANCE = 0.2


class Speedups(NamedTuple):
    """Seconds to the loss of synchronous SGD over those of Non-blocking SGD, per repeat."""

    measured: list[float]
    simulated: list[float]

    @property
    def relative_difference(self) -> float:
        """The relative difference of the simulated mean from the measured mean."""
        return statistics.mean(self.simulated) / statistics.mean(self.measured) - 1

    @property
    def sentence(self) -> str:
        """The finding in a sentence."""
        if math.isnan(self.relative_difference):
            return "Not every run reached the loss."
        shown = [
            f"{statistics.mean(ratios):.2f} ± {sd(ratios):.2f}"
            for ratios in (self.measured, self.simulated)
        ]
        within = "within" if abs(self.relative_difference) <= TOLERANCE else "NOT within"
        return (
            f"Non-blocking SGD was {shown[0]} times faster to the loss; the simulated clock says "
            f"{shown[1]}, which is {100 * self.relative_difference:+.0f} % off: {within} "
            f"{100 * TOLERANCE:.0f} %."
        )


def _rows(task: Task, config: Pace, clock: str, strategy: str, seed: int, run: Run) -> list[Any]:
    names = {"clock": clock, "strategy": strategy, "seed": seed}
    losses = [task.train_score(params)[0] for params in run.params]
    rows: list[dict[str, Any]] = [
        {"kind": "pace", **names, "seconds": seconds, "train_loss": loss}
        for seconds, loss in zip(run.seconds, losses, strict=True)
    ]
    reached = [row["seconds"] for row in rows if row["train_loss"] <= config.loss]
    last = {
        "kind": "pace_run",
        **names,
        "seconds_to_loss": min(reached, default=math.nan),
        "seconds": run.seconds[-1],
        "minibatches": run.minibatches,
        "train_loss": losses[-1],
        "test_accuracy": task.test_score(run.params[-1])[1],
    }
    return [*rows, last]


def speedups_of(runs: list[dict[str, Any]]) -> Speedups:
    """The speedups, from the summary rows of runs."""
    times = {(run["clock"], run["strategy"], run["seed"]): run["seconds_to_loss"] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    return Speedups(
        *(
            [times[clock, SYNCHRONOUS, seed] / times[clock, NON_BLOCKING, seed] for seed in seeds]
            for clock in ("wall", "simulated")
        )
    )


HEADINGS = ("clock", "strategy", "seconds to the loss", "seconds", "mini-batches", "accuracy %")


def _lines(runs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    lines = []
    for clock, strategy in dict.fromkeys((run["clock"], run["strategy"]) for run in runs):
        group = [run for run in runs if (run["clock"], run["strategy"]) == (clock, strategy)]
        times = column(group, "seconds_to_loss")
        lines.append(
            (
                clock,
                strategy,
                f"{statistics.mean(times):.2f} ± {sd(times):.2f}",
                f"{statistics.mean(column(group, 'seconds')):.2f}",
                f"{statistics.mean(column(group, 'minibatches')):,.0f}",
                f"{100 * statistics.mean(column(group, 'test_accuracy')):.1f}",
            )
        )
    return lines


def write_readme(config: Pace, speeds: Timings, seconds: float, runs: list[dict[str, Any]]) -> str:
    """The text of the README; all its numbers are in the record."""
    question = (inspect.getdoc(Pace) or "").splitlines()[0]
    shown = ", ".join(f"{1e3 * each:.1f}" for each in speeds.minibatch)
    return (
        f"# {question}\n\n"
        f"digits, {len(speeds.minibatch)} processes of one machine, windows of "
        f"{config.minibatches} mini-batches of {config.minibatch_size} examples, plain SGD with "
        f"the rate {config.learning_rate:g} for both strategies, {config.repeats} repeats. Each "
        f"mini-batch sleeps {1e3 * config.minibatch_seconds:g} ms, which emulates an accelerator. "
        "In the last process, each mini-batch also computes unused gradients for "
        f"{1e3 * (config.slowdown - 1) * config.minibatch_seconds:g} ms. So the processes do not "
        f"compete for the cores. Mini-batches took {shown} ms (medians), an exchange took "
        f"{1e3 * speeds.exchange:.1f} ms. The deadline of Non-blocking SGD is "
        f"{1e3 * seconds:.1f} ms. The simulated clock uses these times and the same batches.\n\n"
        f"Command: `{describe_command()}`. Versions and machine are in `environment.txt`, every "
        "setting in `config.json`, every raw metric in `metrics.jsonl`.\n\n"
        f"{speedups_of(runs).sentence}\n\n"
        f"{to_markdown(HEADINGS, _lines(runs), left=2)}\n"
        f"Seconds to the loss {config.loss:g} over the whole training set, evaluated every "
        f"{config.log_every} windows; ± is the standard deviation over repeats.\n"
    )


def main(config: Pace) -> int:
    """Runs one process of `launch -- pace`; returns the exit code."""
    if not config.distributed:
        raise ExperimentError(
            "pace requires several processes: python -m experiments launch --processes 4 -- pace."
        )
    if jax.local_device_count() != 1 or jax.process_count() < 2:
        raise ExperimentError("pace requires at least two processes with one device each.")
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    task, runs, measured = Task("digits"), [], []
    with (
        open_record(config) as record,
        Progress(2 * config.repeats) as progress,
        cluster.reraise_lost_process(),
    ):
        waiting = RealTimeTrainer(task, mesh, config, math.inf)
        _, speeds = waiting.run(WARM_UP_SEED, WARM_UP)
        seconds = config.deadline_slack * config.minibatches * float(speeds.minibatch.min())
        measuring = {
            SYNCHRONOUS: waiting,
            NON_BLOCKING: RealTimeTrainer(task, mesh, config, seconds),
        }
        measuring[NON_BLOCKING].run(WARM_UP_SEED, WARM_UP)
        counts = {SYNCHRONOUS: config.windows, NON_BLOCKING: WINDOWS_FACTOR * config.windows}
        for seed in range(config.repeats):
            for strategy, timed in measuring.items():
                run, speeds = timed.run(seed, counts[strategy])
                measured.append(speeds)
                if not cluster.is_main_process():
                    continue
                rows = _rows(task, config, "wall", strategy, seed, run)
                runs.append(rows[-1])
                for row in rows:
                    record.add(row)
                progress.advance(
                    len(runs),
                    f"{strategy:13} {rows[-1]['seconds_to_loss']:.2f} s to the loss, mini-batches "
                    f"of {', '.join(f'{1e3 * each:.1f}' for each in speeds.minibatch)} ms",
                )
        if not cluster.is_main_process():
            return 0
        speeds = Timings(
            np.median([each.minibatch for each in measured], axis=0),
            statistics.median(each.exchange for each in measured),
        )
        straggler = deterministic(speeds.minibatch.tolist())
        triggers = {SYNCHRONOUS: all_workers(), NON_BLOCKING: deadline(seconds)}
        for seed in range(config.repeats):
            for strategy, trigger in triggers.items():
                run = simulate_run(task, config, straggler, trigger, speeds, seed, counts[strategy])
                rows = _rows(task, config, "simulated", strategy, seed, run)
                runs.append(rows[-1])
                for row in rows:
                    record.add(row)
        progress.print(to_rich(HEADINGS, _lines(runs), left=2))
        progress.print(speedups_of(runs).sentence)
        record.write("table.csv", to_csv([*runs[0]], [run.values() for run in runs]))
        record.write("README.md", write_readme(config, speeds, seconds, runs))
        if record.folder:
            progress.print(f"Record: {record.folder}")
        record.finish()
    return 0
