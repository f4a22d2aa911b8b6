"""The table of a comparison of sparse methods, from its raw metrics."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from experiments.methods import BASELINE
from experiments.methods.sparse import ALL_GATHER
from experiments.study import table
from experiments.study.table import sd
from experiments.study.tuning import is_at_edge, mean_losses
from experiments.training.diagnostics import RECORDED_MAXIMA


class Row(NamedTuple):
    """One method at its learning rate, over all seeds."""

    method: str
    workers: int
    seeds: int
    learning_rate: float
    at_edge: bool
    test_loss: float
    test_loss_sd: float
    difference: float  # From the loss of the dense mean, in its standard deviations.
    sparse_bytes: float
    dense_ratio: float
    all_gather_ratio: float
    step_bytes: float
    encode_milliseconds: float
    decode_milliseconds: float
    overflow: float  # The maximum over steps and seeds, as the next three.
    union_density: float
    unpeeled: float
    expected_error: float

    @property
    def is_within(self) -> bool:
        """Whether its loss is at most one standard deviation above that of the dense mean."""
        return self.difference <= 1


def signed(value: float) -> str:
    """Two digits, without a negative zero."""
    return f"{round(value, 2) + 0:+.2f}"


def _ratio(value: float, reference: float | None) -> float:
    return value / reference if reference else math.nan


def summarize(
    costs: Iterable[dict[str, Any]],
    runs: Iterable[dict[str, Any]],
    tuning: Iterable[dict[str, Any]],
) -> list[Row]:
    """One row per method with runs, in the order of the runs.

    Args:
      costs: The rows of kind `"sparse"`.
      runs: The rows of kind `"run"`.
      tuning: The rows of kind `"tuning"`.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(run["method"], []).append(run)
    trials: dict[str, list[dict[str, Any]]] = {}
    for trial in tuning:
        trials.setdefault(trial["method"], []).append(trial)
    by_method = {cost["method"]: cost for cost in costs}
    sent = {method: cost["sparse_bytes"] for method, cost in by_method.items()}
    exact = [run["test_loss"] for run in groups.get(BASELINE, [])]
    spread = sd(exact)
    rows = []
    for method, of_method in groups.items():
        if method not in by_method:
            continue  # In a truncated record.
        cost, losses = by_method[method], [run["test_loss"] for run in of_method]
        above = statistics.mean(losses) - statistics.mean(exact) if exact else math.nan
        rate = of_method[0].get("learning_rate", math.nan)
        maxima = [
            max(run.get(f"max_{name}", math.nan) for run in of_method) for name in RECORDED_MAXIMA
        ]
        rows.append(
            Row(
                method,
                cost["workers"],
                len(of_method),
                rate,
                is_at_edge(rate, mean_losses(trials.get(method, []))),
                statistics.mean(losses),
                sd(losses),
                _ratio(above, spread),
                cost["sparse_bytes"],
                _ratio(cost["sparse_bytes"], sent.get(BASELINE)),
                _ratio(cost["sparse_bytes"], sent.get(ALL_GATHER)),
                cost["step_bytes"],
                cost["encode_milliseconds"],
                cost["decode_milliseconds"],
                *maxima,
            )
        )
    return rows


HEADINGS = (
    "method",
    "learning rate",
    "held-out loss",
    "from dense, in its sd",
    "sparse bytes/worker/step",
    "of dense",
    "of all-gather",
    "all bytes/worker/step",
    "encode ms",
    "decode ms",
    "overflow",
    "unpeeled",
    "expected error",
)


def _cells(row: Row) -> tuple[str, ...]:
    def number(value: float, form: str) -> str:
        return "-" if math.isnan(value) else format(value, form)

    loss, spread = number(row.test_loss, ".3f"), number(row.test_loss_sd, ".3f")
    return (
        row.method,
        f"{row.learning_rate:g}{' (edge)' if row.at_edge else ''}",
        loss if math.isnan(row.test_loss_sd) else f"{loss} ± {spread}",
        "-" if row.method == BASELINE or math.isnan(row.difference) else signed(row.difference),
        number(row.sparse_bytes, ",.0f"),
        number(row.dense_ratio, ".4f"),
        number(row.all_gather_ratio, ".3f"),
        number(row.step_bytes, ",.0f"),
        number(row.encode_milliseconds, ".2f"),
        number(row.decode_milliseconds, ".2f"),
        number(row.overflow, ".3g"),
        number(row.unpeeled, ".3g"),
        number(row.expected_error, ".3g"),
    )


def to_table(rows: Sequence[Row]) -> Table:
    """For the terminal, without some columns."""
    hidden = {"all bytes/worker/step", "overflow", "unpeeled", "expected error"}
    kept = [position for position, heading in enumerate(HEADINGS) if heading not in hidden]
    return table.to_rich(
        [HEADINGS[position] for position in kept],
        [[cells[position] for position in kept] for cells in map(_cells, rows)],
    )


def to_markdown(rows: Sequence[Row]) -> str:
    """For a README."""
    return table.to_markdown(HEADINGS, map(_cells, rows))


def to_csv(rows: Sequence[Row]) -> str:
    """As CSV, with all digits and the verdict."""
    return table.to_csv((*Row._fields, "is_within"), [(*row, row.is_within) for row in rows])
