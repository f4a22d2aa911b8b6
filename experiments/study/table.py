"""Tables for the terminal, for a README, and as CSV with 12 digits."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table


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
    """As CSV. Numbers have 12 digits, since more differ between versions of Python."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow([float(f"{x:.12g}") if isinstance(x, float) else x for x in row])
    return text.getvalue()
