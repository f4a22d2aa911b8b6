"""The tables of the bench, for the terminal and for the README of its record."""

import math
from collections.abc import Sequence

from rich.table import Table

from experiments.bench.methods import ROWS
from experiments.bench.record import BenchRecord, Family, Row
from experiments.study.table import to_markdown, to_rich

HEADINGS = (
    "family",
    "method",
    "ns/coordinate",
    "of the baseline",
    "goal",
    "bytes accessed",
    "temporaries",
    "compile s",
    "HLO lines",
    "collectives",
)
FAMILY_HEADINGS = (
    "family",
    "method",
    "parameters, gradients, state",
    "over those",
    "over those, resident",
)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def _line(row: Row, parameters: int) -> Sequence[str]:
    goal = ROWS[row.name].goal if row.name in ROWS else None
    return (
        row.family,
        row.name,
        _number(min(row.nanoseconds, default=None), 2),
        _number(row.multiple, 1),
        "" if goal is None else f"{goal:g}",
        _number(row.accessed / parameters, 1),
        _number(row.temporaries / parameters, 1),
        _number(row.compile_seconds, 1),
        f"{row.lines:,}",
        str(row.collectives),
    )


def _family_line(family: Family) -> Sequence[str]:
    amounts = (family.arguments, family.peak, family.resident)
    return family.family, family.name, *(_number(amount / 1e6, 0) for amount in amounts)


def to_table(rows: Sequence[Row], parameters: int) -> Table:
    """The table of methods."""
    return to_rich(HEADINGS, [_line(row, parameters) for row in rows], left=2)


def to_family_table(families: Sequence[Family]) -> Table:
    """The table of families."""
    return to_rich(FAMILY_HEADINGS, map(_family_line, families), left=2)


def write_readme(record: BenchRecord) -> str:
    """The text of the README; all its numbers are in the record."""
    header, rows, families = record
    baseline = min((each for row in rows for each in row.baseline), default=math.nan)
    parts = [
        "# What does each method cost on a core, in memory and in the compiler?",
        f"Commit {header.commit}{', with uncommitted changes' * header.changed}; {header.began}.\n"
        f"{header.machine}; JAX {header.jax}. Command: `{header.command}`.\n"
        "Versions are in `environment.txt`, every setting in `config.json`, every number in "
        "`metrics.jsonl`.",
        f"Time is of the whole update of {header.coordinates:,} coordinates, one worker, one core: "
        "the least of all\nrepeats, and as a multiple of the baseline, the plainest compression to "
        f"int8 and back, which took\n{baseline:.2f} ns a coordinate. The rest is of the compiled "
        f"step of one of 8 workers with {header.parameters:,}\nparameters: bytes accessed and "
        "temporaries are bytes a parameter; of a loop, one turn is counted, and\nof branches, all. "
        "Methods that mix parameters have nobody to meet on one device, and are not timed.",
        to_markdown(HEADINGS, [_line(row, header.parameters) for row in rows], left=2).rstrip("\n"),
    ]
    if families:
        parts += [
            f"Memory, in MB, of a step of one worker on one device, with {header.parameters:,} "
            "parameters: what is given,\nand the most over that, as the compiled program says and, "
            "of some, as the process had resident.",
            to_markdown(FAMILY_HEADINGS, map(_family_line, families), left=2).rstrip("\n"),
        ]
    return "\n\n".join(parts) + "\n"
