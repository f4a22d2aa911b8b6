"""The table of an estimate, from its raw metrics."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from experiments.study import table

# Relative to the squared norm of the mean, float32 sums in another order differ by less.
EXACT = 1e-12


class Row(NamedTuple):
    """One method: means over steps, and the range of the error over steps."""

    method: str
    error: float
    min_error: float
    max_error: float
    bias_share: float
    bytes_per_worker: float
    bits_per_coordinate: float
    bytes_ratio: float
    error_times_bits: float


def summarize(estimates: Iterable[dict[str, Any]]) -> list[Row]:
    """One row per method, in the order of the runs."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for estimate in estimates:
        groups.setdefault(estimate["method"], []).append(estimate)
    rows = []
    for method, group in groups.items():
        errors, first = [each["error"] for each in group], group[0]
        error, bits = statistics.mean(errors), first["bits_per_coordinate"]
        bias = statistics.mean(each["squared_bias"] for each in group)
        rows.append(
            Row(
                method,
                error,
                min(errors),
                max(errors),
                bias / error if error > EXACT else math.nan,
                first["bytes_per_worker"],
                bits,
                first["bytes_ratio"],
                error * bits,
            )
        )
    return rows


def frontier(rows: Sequence[Row]) -> list[Row]:
    """The Pareto frontier of methods in error and bits, sorted by bits.

    Excludes errors of 1 or more: the estimate 0, which sends nothing, has an error of 1.
    """
    cost = {row: (row.bits_per_coordinate, max(row.error, EXACT)) for row in rows}

    def is_beaten(row: Row) -> bool:
        bits, error = cost[row]
        others = [cost[other] for other in rows if other is not row]
        return any(b <= bits and e <= error and (b, e) != (bits, error) for b, e in others)

    frontier_rows = [row for row in rows if row.error < 1 and not is_beaten(row)]
    return sorted(frontier_rows, key=lambda row: row.bits_per_coordinate)


def describe_frontier(rows: Sequence[Row]) -> str:
    """The frontier in one sentence."""
    names = ", ".join(f"`{row.method}`" for row in frontier(rows))
    return f"No other method is better in both error and bits, from fewest bits to most: {names}."


HEADINGS = (
    "method",
    "error",
    "over steps",
    "share of bias",
    "bytes/worker",
    "bits/coordinate",
    "ratio",
    "error x bits",
)


def _small(value: float) -> str:
    """Scientific notation, since errors span many decades."""
    if math.isnan(value):
        return "-"
    return f"< {EXACT:.0e}" if value <= EXACT else f"{value:.2e}"


def _cells(row: Row) -> tuple[str, ...]:
    exact = row.error <= EXACT
    return (
        row.method,
        _small(row.error),
        "-" if exact else f"{row.min_error:.1e} to {row.max_error:.1e}",
        "-" if math.isnan(row.bias_share) else f"{row.bias_share:z.3f}",
        f"{row.bytes_per_worker:,.0f}",
        f"{row.bits_per_coordinate:.2f}",
        f"{row.bytes_ratio:.3f}",
        "-" if exact else _small(row.error_times_bits),
    )


def to_table(rows: Sequence[Row]) -> Table:
    """For the terminal."""
    return table.to_rich(HEADINGS, map(_cells, rows))


def to_markdown(rows: Sequence[Row]) -> str:
    """For a README."""
    return table.to_markdown(HEADINGS, map(_cells, rows))


def to_csv(rows: Sequence[Row]) -> str:
    """As CSV, with all digits."""
    return table.to_csv(Row._fields, rows)
