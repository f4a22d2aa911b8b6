"""The table and the claim of a comparison of gossip, from raw metrics."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from experiments.methods.gossip import BASELINE, CLAIMED
from experiments.study import table
from experiments.study.table import column, sd


class Row(NamedTuple):
    """One method on one graph and split, over all seeds."""

    graph: str
    split: str
    method: str
    workers: int
    seeds: int
    train_loss: float
    train_loss_sd: float
    test_accuracy: float
    test_accuracy_sd: float
    distance: float
    rounds_per_step: float
    bytes_per_step: float


class Claim(NamedTuple):
    """Whether two curves agree over the last half of the steps, within the spread of seeds."""

    graph: str
    split: str
    largest: float  # difference of the mean curves, in standard deviations of the baseline
    above: bool  # whether the claimed method has the higher loss there
    rounds: float  # of the claimed method over those of the baseline

    @property
    def holds(self) -> bool:
        """Whether the curves are within one standard deviation."""
        return self.largest <= 1

    @property
    def sentence(self) -> str:
        """The finding in a sentence."""
        return (
            f"{self.graph}, {self.split}: {CLAIMED} is at most {self.largest:.2f} standard "
            f"deviations from {BASELINE} over the last half of the steps (there "
            f"{'above' if self.above else 'below'} it), for {self.rounds:.2f} of its rounds: "
            f"{'as claimed' if self.holds else 'not as claimed'}."
        )


def summarize(runs: Iterable[dict[str, Any]]) -> list[Row]:
    """One row per graph, split and method, in the order of the runs."""
    rows = []
    for (graph, split, method), group in table.grouped(runs, "graph", "split", "method").items():
        rows.append(
            Row(
                graph,
                split,
                method,
                group[0]["workers"],
                len(group),
                statistics.mean(column(group, "train_loss")),
                sd(column(group, "train_loss")),
                statistics.mean(column(group, "test_accuracy")),
                sd(column(group, "test_accuracy")),
                statistics.mean(column(group, "distance")),
                statistics.mean(column(group, "rounds_per_step")),
                statistics.mean(column(group, "bytes_per_step")),
            )
        )
    return rows


def claims(curves: Iterable[dict[str, Any]]) -> list[Claim]:
    """One claim per graph and split that has both methods and at least two seeds."""
    claims_found = []
    for (graph, split), group in table.grouped(curves, "graph", "split").items():
        by_method = {name: rows for (name,), rows in table.grouped(group, "method").items()}
        seeds = {row["seed"] for row in group}
        if BASELINE not in by_method or CLAIMED not in by_method or len(seeds) < 2:
            continue
        half = max(row["step"] for row in group) / 2
        baseline_rows, claimed_rows = (
            table.grouped(by_method[m], "step") for m in (BASELINE, CLAIMED)
        )
        differences = []
        for step, rows in baseline_rows.items():
            if step[0] <= half:
                continue
            losses = [row["train_loss"] for row in rows]
            mean = statistics.mean(row["train_loss"] for row in claimed_rows[step])
            spread = sd(losses)
            differences.append((mean - statistics.mean(losses)) / spread if spread else math.nan)
        largest = max(differences, key=abs)
        rounds = [sum(row["rounds"] for row in by_method[m]) for m in (CLAIMED, BASELINE)]
        claims_found.append(Claim(graph, split, abs(largest), largest > 0, rounds[0] / rounds[1]))
    return claims_found


HEADINGS = (
    "graph",
    "split",
    "method",
    "final training loss",
    "test accuracy %",
    "distance",
    "rounds/step",
    "bytes/worker/step",
)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.graph,
        row.split,
        row.method,
        table.mean_and_sd(row.train_loss, row.train_loss_sd, 4),
        table.mean_and_sd(row.test_accuracy, row.test_accuracy_sd, 1, 100),
        f"{row.distance:.2g}",
        f"{row.rounds_per_step:.2f}",
        f"{row.bytes_per_step:,.0f}",
    )


def to_table(rows: Sequence[Row]) -> Table:
    """For the terminal."""
    return table.to_rich(HEADINGS, map(_cells, rows), left=3)


def to_markdown(rows: Sequence[Row]) -> str:
    """For a README."""
    return table.to_markdown(HEADINGS, map(_cells, rows), left=3)


def to_csv(rows: Sequence[Row]) -> str:
    """As CSV, with all digits."""
    return table.to_csv(Row._fields, rows)
