"""The table of a survey, from raw metrics, and the test against the mean."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table
from scipy import stats

from experiments.methods import BASELINE, KINDS, parse_variant
from experiments.study import table
from experiments.study.table import column, sd
from experiments.study.tuning import is_at_edge, mean_losses

# The false positive rate: 1 % of methods as good as the mean would be reported as worse.
SIGNIFICANCE = 0.01


class Row(NamedTuple):
    """One method and optimizer at its learning rate, over all seeds; ratios are to `mean`."""

    optimizer: str
    method: str
    kind: str
    seeds: int
    learning_rate: float
    at_edge: bool
    test_loss: float
    test_loss_sd: float
    loss_ratio: float
    p_value: float
    test_accuracy: float
    train_loss: float
    bytes_per_step: float
    bytes_ratio: float
    compression_error: float

    @property
    def is_judged(self) -> bool:
        """Whether there are runs of `mean` with at least two common seeds."""
        return self.method != BASELINE and not math.isnan(self.p_value)

    @property
    def loses(self) -> bool:
        """Whether its loss is significantly above that of the mean."""
        return self.is_judged and self.p_value < SIGNIFICANCE

    @property
    def saves(self) -> bool:
        """Whether it sends at least 1 % fewer bytes."""
        return self.bytes_ratio < 0.99


def p_value(losses: Sequence[float], of_mean: Sequence[float]) -> float:
    """The p-value of a one-sided paired t-test of the logarithms of losses against the mean.

    NaN for fewer than two seeds or a loss without a logarithm; 0 if a run diverged.
    """
    if len(losses) < 2 or len(losses) != len(of_mean) or not np.isfinite(of_mean).all():
        return math.nan
    if 0 in (*losses, *of_mean):
        return math.nan
    if not np.isfinite(losses).all():
        return 0.0
    ratios = np.log(losses) - np.log(of_mean)
    if np.ptp(ratios) == 0:
        return 0.0 if ratios[0] > 0 else 1.0
    return float(stats.ttest_1samp(ratios, 0, alternative="greater").pvalue)


def summarize(runs: Iterable[dict[str, Any]], tuning: Iterable[dict[str, Any]]) -> list[Row]:
    """One row per optimizer and method, in the order of the runs.

    Args:
      runs: The rows of kind `"run"`.
      tuning: The rows of kind `"tuning"`.
    """
    groups = table.grouped(runs, "optimizer", "method")
    trials = table.grouped(tuning, "optimizer", "method")
    rows = []
    for (optimizer, method), of_method in groups.items():
        exact = {run["seed"]: run for run in groups.get((optimizer, BASELINE), [])}
        loss, sent = (
            column(of_method, "test_loss"),
            statistics.mean(column(of_method, "bytes_per_step")),
        )
        paired = [exact[seed]["test_loss"] for seed in column(of_method, "seed") if seed in exact]
        full = statistics.mean(run["bytes_per_step"] for run in exact.values()) if exact else 0
        rate = of_method[0].get("learning_rate", math.nan)
        rows.append(
            Row(
                optimizer,
                method,
                parse_variant(method).kind,
                len(of_method),
                rate,
                is_at_edge(rate, mean_losses(trials.get((optimizer, method), []))),
                statistics.mean(loss),
                sd(loss),
                statistics.mean(loss) / statistics.mean(paired) if any(paired) else math.nan,
                p_value(loss, paired),
                statistics.mean(column(of_method, "test_accuracy")),
                statistics.mean(column(of_method, "train_loss")),
                sent,
                sent / full if full else math.nan,
                statistics.mean(column(of_method, "compression_error")),
            )
        )
    return rows


HEADINGS = (
    "optimizer",
    "method",
    "kind",
    "learning rate",
    "test loss",
    "of mean's",
    "p",
    "test accuracy %",
    "training loss",
    "bytes/worker/step",
    "of mean's",
    "compression error",
)


def _cells(row: Row) -> tuple[str, ...]:
    def number(value: float, form: str) -> str:
        return "-" if math.isnan(value) else format(value, form)

    loss, spread = number(row.test_loss, ".3f"), number(row.test_loss_sd, ".3f")
    return (
        row.optimizer,
        row.method,
        KINDS[row.kind],
        f"{row.learning_rate:g}{' (edge)' if row.at_edge else ''}",
        loss if math.isnan(row.test_loss_sd) else f"{loss} ± {spread}",
        number(row.loss_ratio, ".2f"),
        number(row.p_value, ".3f") if row.is_judged else "-",
        number(100 * row.test_accuracy, ".1f"),
        number(row.train_loss, ".4f"),
        number(row.bytes_per_step, ",.0f"),
        number(row.bytes_ratio, ".3f"),
        number(row.compression_error, ".3g"),
    )


def to_table(rows: Sequence[Row]) -> Table:
    """For the terminal, without some columns."""
    hidden = {"kind", "training loss", "bytes/worker/step"}
    kept = [position for position, heading in enumerate(HEADINGS) if heading not in hidden]
    return table.to_rich(
        [HEADINGS[position] for position in kept],
        [[cells[position] for position in kept] for cells in map(_cells, rows)],
        left=2,
    )


def to_markdown(rows: Sequence[Row]) -> str:
    """For a README."""
    return table.to_markdown(HEADINGS, map(_cells, rows), left=3)


def to_csv(rows: Sequence[Row]) -> str:
    """As CSV, with all digits and the two verdicts."""
    return table.to_csv(
        (*Row._fields, "loses", "saves"), [(*row, row.loses, row.saves) for row in rows]
    )
