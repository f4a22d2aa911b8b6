"""The tables of the bench, for the terminal and for the README of its record."""

import math
from collections.abc import Sequence

from rich.table import Table as RichTable

from experiments.bench import record as bench_record
from experiments.bench.methods import ROWS
from experiments.bench.record import BenchRecord, Row
from experiments.study.columns import Column, Line, Table, key
from experiments.study.groups import Group, Value, first


def _per_parameter(name: str) -> Value:
    return lambda group: group.runs[0][name] / group.runs[0]["parameters"]


def _goal(group: Group) -> float | None:
    name = group.keys["name"]
    return ROWS[name].goal if name in ROWS else None


METHOD = Column("method", lambda group: group.keys["name"], text=True)
METHODS = Table(
    by=("family", "name"),
    columns=(
        key("family"),
        METHOD,
        Column("ns/coordinate", lambda g: min(g.runs[0]["nanoseconds"], default=None), ",.2f"),
        Column("of the baseline", lambda g: bench_record.multiple(g.runs[0]), ",.1f"),
        Column("goal", _goal, "g"),
        Column("bytes accessed", _per_parameter("accessed"), ",.1f"),
        Column("temporaries", _per_parameter("temporaries"), ",.1f"),
        Column("compile s", first("compile_seconds"), ",.1f"),
        Column("HLO lines", first("lines"), ","),
        Column("collectives", first("collectives")),
    ),
)
FAMILIES = Table(
    by=("family", "name"),
    columns=(
        key("family"),
        METHOD,
        Column("parameters, gradients, state", first("arguments"), ",.0f", scale=1e-6),
        Column("over those", first("peak"), ",.0f", scale=1e-6),
        Column("over those, resident", first("resident"), ",.0f", scale=1e-6),
    ),
)


def _lines(table: Table, rows: Sequence[Row], parameters: int = 1) -> list[Line]:
    return table.lines(
        {**row, "schema": 1, "kind": "run", "parameters": parameters} for row in rows
    )


def to_table(rows: Sequence[Row], parameters: int) -> RichTable:
    """The table of methods."""
    return METHODS.to_rich(_lines(METHODS, rows, parameters))


def to_family_table(families: Sequence[Row]) -> RichTable:
    """The table of families."""
    return FAMILIES.to_rich(_lines(FAMILIES, families))


def write_readme(record: BenchRecord) -> str:
    """The text of the README; all its numbers are in the record."""
    header, rows, families = record
    baseline = min((each for row in rows for each in row["baseline"]), default=math.nan)
    parts = [
        "# What does each method cost on a core, in memory and in the compiler?",
        f"Commit {header['commit']}{', with uncommitted changes' * header['changed']}; "
        f"{header['began']}.\n{header['machine']}; JAX {header['jax']}. Command: "
        f"`{header['command']}`.\nVersions are in `environment.txt`, every setting in "
        "`config.json`, every number in `metrics.jsonl`.",
        f"Times are of the whole update of {header['coordinates']:,} coordinates by one worker on "
        "one core: the minimum over repeats,\nin nanoseconds per coordinate and as a multiple of "
        "the baseline. The baseline is the simplest compression to int8 and\nback, which took "
        f"{baseline:.2f} ns per coordinate. The other columns are of the compiled step of one of 8 "
        f"workers with\n{header['parameters']:,} parameters. Bytes accessed and temporaries are "
        "bytes per parameter, with one iteration of each loop\nand all branches. Methods that mix "
        "parameters need several workers, and are not timed.",
        METHODS.to_markdown(_lines(METHODS, rows, header["parameters"])).rstrip("\n"),
    ]
    if families:
        parts += [
            "Memory, in MB, of a step of one worker on one device, with "
            f"{header['parameters']:,} parameters: the arguments of the step, and the\npeak beside "
            "those, of the compiled program and, for some methods, of the resident process.",
            FAMILIES.to_markdown(_lines(FAMILIES, families)).rstrip("\n"),
        ]
    return "\n\n".join(parts) + "\n"
