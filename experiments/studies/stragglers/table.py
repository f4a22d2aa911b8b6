"""The table and the claim of a comparison of stragglers, from raw metrics."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from experiments.methods.stragglers import BLOCKING_FORM
from experiments.study import table
from experiments.study.table import sd

CLAIMED_SPEEDUP = 2.0  # The paper claims up to this speedup.


class Row(NamedTuple):
    """One strategy with one kind of slow workers, over all seeds."""

    dataset: str
    speeds: str
    strategy: str
    seeds: int
    learning_rate: float
    loss: float
    reached: int  # number of seeds that reach the loss
    seconds_to_loss: float  # over those seeds
    seconds_to_loss_sd: float
    seconds_per_step: float
    minibatches_per_second: float
    idle: float  # windows per run in which no worker finished a mini-batch
    test_accuracy: float
    test_accuracy_sd: float


class Gain(NamedTuple):
    """The time to the loss of a blocking strategy over that of its non-blocking form."""

    dataset: str
    speeds: str
    strategy: str
    waiting: str
    ratio: float  # the mean of the ratios over seeds; NaN unless both reach the loss with all seeds
    ratio_sd: float

    @property
    def sentence(self) -> str:
        """The finding in a sentence."""
        where = f"{self.dataset}, {self.speeds}: {self.strategy} to {self.waiting}"
        if math.isnan(self.ratio):
            return f"{where}: one of the two diverges with a seed."
        shown = f"{self.ratio:.2f}" + (
            "" if math.isnan(self.ratio_sd) else f" ± {self.ratio_sd:.2f}"
        )
        kind = "faster" if self.ratio > 1 else "as fast: it is slower"
        return f"{where}: {shown} times {kind}."


def add_times(
    curves: Iterable[dict[str, Any]], runs: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Adds the target loss and the seconds to it to each run; NaN seconds if the run diverged.

    The target loss of a dataset is the lowest loss that all runs that do not diverge reach.
    """
    names = ("dataset", "speeds", "strategy", "seed")
    by_run = defaultdict(list, table.grouped(curves, *names))
    ends = [run for run in runs if math.isfinite(run["train_loss"])]
    targets = {
        dataset: max(
            min(
                (row["train_loss"] for row in by_run[tuple(run[name] for name in names)]),
                default=math.nan,
            )
            for run in of_dataset
        )
        for (dataset,), of_dataset in table.grouped(ends, "dataset").items()
    }
    timed = []
    for run in runs:
        target = targets.get(run["dataset"], math.nan)
        rows = by_run[tuple(run[name] for name in names)]
        reached = [row["seconds"] for row in rows if row["train_loss"] <= target]
        diverged = not math.isfinite(run["train_loss"])
        seconds = math.nan if diverged else min(reached, default=math.nan)
        timed.append({**run, "loss": target, "seconds_to_loss": seconds})
    return timed


def summarize(runs: Iterable[dict[str, Any]]) -> list[Row]:
    """One row per dataset, speeds and strategy, from runs with times."""
    rows = []
    for names, group in table.grouped(runs, "dataset", "speeds", "strategy").items():
        times = [t for run in group if not math.isnan(t := run["seconds_to_loss"])]
        accuracies = [run["test_accuracy"] for run in group]
        seconds = sum(run["seconds"] for run in group)
        rows.append(
            Row(
                *names,
                len(group),
                group[0]["learning_rate"],
                group[0]["loss"],
                len(times),
                statistics.mean(times) if times else math.nan,
                sd(times),
                seconds / sum(run["steps"] for run in group),
                sum(run["minibatches"] for run in group) / seconds,
                statistics.mean(run["idle"] for run in group),
                statistics.mean(accuracies),
                sd(accuracies),
            )
        )
    return rows


def gains(runs: Iterable[dict[str, Any]]) -> list[Gain]:
    """The gains per dataset, speeds and non-blocking strategy, from ratios per seed."""
    found = []
    for (dataset, speeds), group in table.grouped(runs, "dataset", "speeds").items():
        by_strategy = {name: rows for (name,), rows in table.grouped(group, "strategy").items()}
        for strategy, waiting in BLOCKING_FORM.items():
            if not {strategy, waiting} <= by_strategy.keys():
                continue
            blocking_times = {run["seed"]: run["seconds_to_loss"] for run in by_strategy[waiting]}
            ratios = [
                blocking_times[run["seed"]] / run["seconds_to_loss"]
                for run in by_strategy[strategy]
            ]
            mean = statistics.mean(ratios)
            found.append(Gain(dataset, speeds, strategy, waiting, mean, sd(ratios)))
    return found


HEADINGS = (
    "dataset",
    "speeds",
    "strategy",
    "rate",
    "seconds to the loss",
    "reached",
    "seconds/step",
    "mini-batches/s",
    "idle",
    "test accuracy %",
)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.dataset,
        row.speeds,
        row.strategy,
        f"{row.learning_rate:g}",
        table.mean_and_sd(row.seconds_to_loss, row.seconds_to_loss_sd, 2),
        f"{row.reached}/{row.seeds}",
        f"{row.seconds_per_step:.4f}",
        f"{row.minibatches_per_second:,.0f}",
        f"{row.idle:g}",
        table.mean_and_sd(row.test_accuracy, row.test_accuracy_sd, 1, 100),
    )


def _sorted(rows: Sequence[Row]) -> list[Row]:
    """Sorts rows so that strategies of the same dataset and speeds are adjacent."""
    orders = {name: list(dict.fromkeys(getattr(row, name) for row in rows)) for name in Row._fields}
    return sorted(
        rows, key=lambda row: [orders[n].index(getattr(row, n)) for n in ("dataset", "speeds")]
    )


def to_table(rows: Sequence[Row]) -> Table:
    """For the terminal."""
    return table.to_rich(HEADINGS, map(_cells, _sorted(rows)), left=3)


def to_markdown(rows: Sequence[Row]) -> str:
    """For a README."""
    return table.to_markdown(HEADINGS, map(_cells, _sorted(rows)), left=3)


def to_csv(rows: Sequence[Row]) -> str:
    """As CSV, with all digits."""
    return table.to_csv(Row._fields, _sorted(rows))
