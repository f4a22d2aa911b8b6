"""The table of a comparison, from its raw metrics."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from experiments.methods import BASELINE
from experiments.study import table
from experiments.study.table import column, sd


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


def summarize(finished_runs: Iterable[dict[str, Any]]) -> list[Row]:
    """One row per optimizer and method, in the order of the runs; ratios are to `mean`."""
    groups = table.grouped(finished_runs, "optimizer", "method")
    rows = []
    for (optimizer, method), runs in groups.items():
        loss, sent = statistics.mean(column(runs, "train_loss")), runs[0]["bytes_per_step"]
        exact = groups.get((optimizer, BASELINE))
        exact_loss = statistics.mean([run["train_loss"] for run in exact]) if exact else math.nan
        exact_bytes = exact[0]["bytes_per_step"] if exact else math.nan
        rows.append(
            Row(
                optimizer,
                method,
                len(runs),
                loss,
                sd(column(runs, "train_loss")),
                loss / exact_loss if exact_loss else math.nan,
                statistics.mean(column(runs, "test_accuracy")),
                sd(column(runs, "test_accuracy")),
                sent,
                sent / exact_bytes if exact_bytes else math.nan,
                statistics.mean(column(runs, "compression_error")),
                statistics.median(column(runs, "step_milliseconds")),
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
    def number(value: float, digits: int) -> str:
        return "-" if math.isnan(value) else f"{value:,.{digits}f}"

    return (
        row.optimizer,
        row.method,
        table.mean_and_sd(row.train_loss, row.train_loss_sd, 4),
        number(row.loss_ratio, 2),
        table.mean_and_sd(row.test_accuracy, row.test_accuracy_sd, 1, 100),
        number(row.bytes_per_step, 0),
        number(row.bytes_ratio, 3),
        number(row.compression_error, 3),
        number(row.step_milliseconds, 1),
    )


def to_table(rows: Sequence[Row]) -> Table:
    """For the terminal."""
    return table.to_rich(HEADINGS, map(_cells, rows), left=2)


def to_markdown(rows: Sequence[Row]) -> str:
    """For a README."""
    return table.to_markdown(HEADINGS, map(_cells, rows), left=2)


def to_csv(rows: Sequence[Row]) -> str:
    """As CSV, with all digits."""
    return table.to_csv(Row._fields, rows)
