"""Tables for the terminal, for a README, and as CSV with all digits."""

import csv
import io
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table


def grouped(rows: Iterable[dict[str, Any]], *names: str) -> dict[tuple, list[dict[str, Any]]]:
    """Groups rows by their values of `names`, in the order of first occurrence."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def column(rows: Iterable[dict[str, Any]], name: str) -> list[Any]:
    """The values of one column."""
    return [row[name] for row in rows]


def sd(values: Sequence[float]) -> float:
    """The standard deviation of a sample; NaN for fewer than two or non-finite values."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values)


def mean_and_sd(mean: float, deviation: float, digits: int, scale: float = 1.0) -> str:
    """A mean and its standard deviation; a mean of NaN is `-`, a deviation of NaN is omitted."""
    if math.isnan(mean):
        return "-"
    shown = f"{scale * mean:,.{digits}f}"
    return shown if math.isnan(deviation) else f"{shown} ± {scale * deviation:,.{digits}f}"


def to_rich(
    headings: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1, title: str | None = None
) -> Table:
    """For the terminal. With `left` > 1 text columns, a rule separates values of the first."""
    table = Table(title=title)
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="left" if position < left else "right", overflow="fold")
    previous = None
    for line in lines:
        if left > 1 and previous not in (None, line[0]):
            table.add_section()
        previous = line[0]
        table.add_row(*line)
    return table


def to_markdown(headings: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> str:
    """For a README: `left` columns of text, then columns of numbers."""
    rules = ["---"] * left + ["---:"] * (len(headings) - left)
    return "".join("| " + " | ".join(line) + " |\n" for line in (headings, rules, *lines))


def to_csv(names: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """As CSV, with all digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return text.getvalue()
