"""Compares the simulated time of strategies to the same loss with slow workers."""

import dataclasses
import functools
import math
import statistics
import time
from typing import Any, NamedTuple

from experiments.cli.choices import select
from experiments.cli.configs import Stragglers
from experiments.cli.errors import ExperimentError
from experiments.cli.progress import Progress
from experiments.methods.stragglers import SPEEDS, STRATEGIES, WORKERS
from experiments.studies.stragglers.report import write_readme
from experiments.studies.stragglers.table import add_times, gains, summarize, to_csv, to_table
from experiments.study import figures
from experiments.study.record import open_record
from experiments.study.tuning import choose, is_at_edge, mean_losses
from experiments.tasks.task import Task
from experiments.training.timeline import Timeline, timeline
from experiments.training.windows import Trainer

# The text has short examples, and its training loss is over a part of the training set.
TASKS = {"digits": {}, "text": {"window": 16, "scored_examples": 200}}
TUNING_SEED = 1000


class Curve(NamedTuple):
    """The losses of a run, without times."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]  # over the training set
    test_loss: float
    test_accuracy: float


class Comparison:
    """All strategies on one dataset."""

    def __init__(self, dataset: str, config: Stragglers):
        """Reads the data."""
        steps = {"digits": config.steps, "text": config.text_steps}[dataset]
        config = dataclasses.replace(config, steps=steps)
        self.config, self.dataset = config, dataset
        self._task = Task(dataset, **TASKS[dataset])
        self._tuned = self._task.hold_out()
        each = len(self._tuned.dataset.train_inputs) // WORKERS
        if config.minibatch_size > each:
            raise ExperimentError(
                f"--minibatch-size {config.minibatch_size} exceeds the {each} examples of a worker."
            )
        self._link = functools.cache(
            lambda strategy: self._trainer(strategy, False).link(self._task.first_weights(0))
        )
        self._trainer = functools.cache(
            lambda strategy, tuned: Trainer(
                self._tuned if tuned else self._task, STRATEGIES[strategy], config
            )
        )
        self._curves: dict[Any, Curve] = {}

    def timeline(self, strategy: str, speeds: str, seed: int) -> Timeline:
        """The timeline of a strategy."""
        return timeline(STRATEGIES[strategy], self._link(strategy), speeds, seed, self.config)

    def curve(self, strategy: str, speeds: str, rate: float, seed: int, *, tuned: bool) -> Curve:
        """One run. For strategies that wait, it does not depend on the speeds."""
        key = strategy, None if STRATEGIES[strategy].waits_for_all else speeds, rate, seed, tuned
        if key not in self._curves:
            task = self._tuned if tuned else self._task
            when = self.timeline(strategy, speeds, seed)
            steps, losses = [], []
            for step, params in self._trainer(strategy, tuned).train(when, rate, seed):
                steps.append(step)
                losses.append(math.nan if tuned else task.train_score(params)[0])
            self._curves[key] = Curve(tuple(steps), tuple(losses), *task.test_score(params))
        return self._curves[key]

    def tune(self, strategy: str, speeds: str) -> list[dict[str, Any]]:
        """A row per rate, with the loss on a held-out part of the training set."""
        return [
            {
                "kind": "straggler_tuning",
                "dataset": self.dataset,
                "speeds": speeds,
                "strategy": strategy,
                "learning_rate": rate,
                "validation_loss": self.curve(
                    strategy, speeds, rate, TUNING_SEED, tuned=True
                ).test_loss,
            }
            for rate in self.config.learning_rates
        ]

    def run(self, strategy: str, speeds: str, rate: float, seed: int) -> list[dict[str, Any]]:
        """The rows of one run; the last row is its summary."""
        names = {"dataset": self.dataset, "speeds": speeds, "strategy": strategy, "seed": seed}
        curve = self.curve(strategy, speeds, rate, seed, tuned=False)
        when = self.timeline(strategy, speeds, seed)
        finished = when.window.finished.sum(axis=1).cumsum()
        rows = [
            {
                "kind": "straggler",
                **names,
                "step": step,
                "seconds": float(when.seconds[step - 1]),
                "minibatches": int(finished[step - 1]),
                "train_loss": loss,
            }
            for step, loss in zip(curve.steps, curve.losses, strict=True)
        ]
        last = {
            "kind": "straggler_run",
            **names,
            "learning_rate": rate,
            "steps": curve.steps[-1],
            "seconds": float(when.seconds[-1]),
            "minibatches": int(finished[-1]),
            "idle": int(when.idle[-1]),
            "train_loss": curve.losses[-1],
            "test_loss": curve.test_loss,
            "test_accuracy": curve.test_accuracy,
        }
        return [*rows, last]


def main(config: Stragglers) -> int:
    """Runs `python -m experiments stragglers`; returns the exit code."""
    strategies = select(config.strategies, [*STRATEGIES], "--strategies")
    all_speeds = select(config.speeds, [*SPEEDS], "--speeds")
    settings = [
        (dataset, strategy, speeds)
        for dataset in config.datasets
        for strategy in strategies
        for speeds in all_speeds
    ]
    comparisons = {dataset: Comparison(dataset, config) for dataset in config.datasets}
    curves: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    at_edge: list[str] = []
    with open_record(config) as record, Progress(len(settings)) as progress:
        progress.print(f"{len(settings)} settings, {config.seeds} seeds each")
        for number, (dataset, strategy, speeds) in enumerate(settings, 1):
            began = time.perf_counter()
            comparison = comparisons[dataset]
            rate, *others = config.learning_rates
            trials = comparison.tune(strategy, speeds) if others else []
            losses = mean_losses(trials)
            rate = choose(losses) if others else rate
            if is_at_edge(rate, losses):
                at_edge.append(f"{dataset}, {strategy}, {speeds}: {rate:g}")
            for trial in trials:
                record.add(trial)
            for seed in range(config.seeds):
                rows = comparison.run(strategy, speeds, rate, seed)
                for row in rows:
                    record.add(row)
                curves += rows[:-1]
                runs.append(rows[-1])
            latest = runs[-config.seeds :]
            loss, accuracy, seconds = (
                statistics.mean(run[name] for run in latest)
                for name in ("train_loss", "test_accuracy", "seconds")
            )
            progress.advance(
                number,
                f"{dataset:7}{speeds:12}{strategy:20} rate {rate:g}: training loss {loss:.4f} and "
                f"test accuracy {100 * accuracy:.1f} % after {seconds:.2f} simulated seconds, "
                f"{time.perf_counter() - began:.0f} s",
            )
        timed = add_times(curves, runs)
        rows, speedups = summarize(timed), gains(timed)
        progress.print(to_table(rows))
        for gain in speedups:
            progress.print(gain.sentence)
        record.write("table.csv", to_csv(rows))
        record.write("README.md", write_readme(config, rows, speedups, at_edge))
        if record.folder:
            figures.draw(record.folder)
            progress.print(f"Record: {record.folder}")
        record.finish()
    return 0
