"""The table of a comparison, from its raw metrics."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from experiments import tables

BASELINE = "mean"
OPTIMIZER_TITLES = {"sgd": "SGD with momentum", "adam": "Adam", "adagrad": "Adagrad"}


class Row(NamedTuple):
    """One method with one optimizer, over all seeds."""

    optimizer: str
    method: str
    seeds: int
    train_loss: float
    train_loss_sd: float
    loss_ratio: float
    test_accuracy: float
    test_accuracy_sd: float
    bytes_per_step: float
    bytes_ratio: float
    compression_error: float
    step_milliseconds: float


def sd(values: Sequence[float]) -> float:
    """The standard deviation of a sample; NaN for fewer than two or non-finite values."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values)


def summarize(finished_runs: Iterable[dict[str, Any]]) -> list[Row]:
    """One row per optimizer and method, in the order of the runs; ratios are to `mean`."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in finished_runs:
        groups.setdefault((run["optimizer"], run["method"]), []).append(run)
    rows = []
    for (optimizer, method), runs in groups.items():
        column = lambda name, runs=runs: [run[name] for run in runs]  # noqa: E731
        loss, sent = statistics.mean(column("train_loss")), runs[0]["bytes_per_step"]
        exact = groups.get((optimizer, BASELINE))
        exact_loss = statistics.mean([run["train_loss"] for run in exact]) if exact else math.nan
        exact_bytes = exact[0]["bytes_per_step"] if exact else math.nan
        rows.append(
            Row(
                optimizer,
                method,
                len(runs),
                loss,
                sd(column("train_loss")),
                loss / exact_loss if exact_loss else math.nan,
                statistics.mean(column("test_accuracy")),
                sd(column("test_accuracy")),
                sent,
                sent / exact_bytes if exact_bytes else math.nan,
                statistics.mean(column("compression_error")),
                statistics.median(column("step_milliseconds")),
            )
        )
    return rows


HEADINGS = (
    "optimizer",
    "method",
    "final training loss",
    "ratio",
    "test accuracy %",
    "bytes/worker/step",
    "ratio",
    "compression error",
    "ms/step",
)


def _cells(row: Row) -> tuple[str, ...]:
    def number(value: float, digits: int, scale: float = 1.0) -> str:
        return "-" if math.isnan(value) else f"{scale * value:,.{digits}f}"

    def spread(mean: float, sd: float, digits: int, scale: float = 1.0) -> str:
        shown = number(mean, digits, scale)
        return shown if math.isnan(sd) else f"{shown} ± {number(sd, digits, scale)}"

    return (
        row.optimizer,
        row.method,
        spread(row.train_loss, row.train_loss_sd, 4),
        number(row.loss_ratio, 2),
        spread(row.test_accuracy, row.test_accuracy_sd, 1, 100),
        number(row.bytes_per_step, 0),
        number(row.bytes_ratio, 3),
        number(row.compression_error, 3),
        number(row.step_milliseconds, 1),
    )


def to_table(rows: Sequence[Row]) -> Table:
    """For the terminal."""
    return tables.to_rich(HEADINGS, map(_cells, rows), left=2)


def to_markdown(rows: Sequence[Row]) -> str:
    """For a README."""
    return tables.to_markdown(HEADINGS, map(_cells, rows), left=2)


def to_csv(rows: Sequence[Row]) -> str:
    """As CSV, with all digits."""
    return tables.to_csv(Row._fields, rows)
