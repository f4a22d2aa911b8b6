"""Records of the bench: their rows, tables and README, and regressions since another one.

- `bench`: the header: the start, command, commit, machine and JAX, `coordinates` of the timed
  updates, and `parameters` of the compiled programs.
- `bench_row`: a method: `nanoseconds`, the least per coordinate in each repeat, and those of the
  `baseline`, the simplest compression, in the same rounds; both are empty if it is not timed. The
  others are of `experiments.bench.programs.compile_step`, for one of eight workers.
- `bench_memory`: bytes of a single worker: arguments and peak of the program.

A regression is more than noise:

- Multiples of the baseline, the least time of a run over the least of the baseline: an increase by
  more than 10 %, and by more than the increase of either run's multiple without the best repeat of
  the method and of the baseline. Nanoseconds are not compared: the speed of a machine changes by
  the hour, and that of the baseline with it.
- Core seconds to compile: an increase by more than half, and by more than one second.
- Counts in the compiled program have no noise: any increase.
"""

import datetime
import math
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.bench.updates import GOALS
from experiments.errors import ExperimentError
from experiments.study import record as recording
from experiments.study.record import commit, describe_command, of_kind
from experiments.study.table import to_markdown

SCHEMA = 1
SLOWER = 1.1
COMPILES_SLOWER, SECONDS = 1.5, 1.0

KEY = ("machine", "jax", "coordinates", "parameters", "schema")
"""What two records must share for a comparison of their numbers."""

COUNTS = {
    "lines": "HLO lines",
    "collectives": "collectives",
    "accessed": "bytes accessed",
    "temporaries": "bytes of temporaries",
}
"""Columns of a method that have no noise, and their names in a report."""

HEADINGS_OF_METHODS = (
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
HEADINGS_OF_MEMORY = (
    "family",
    "method",
    "parameters, gradients, state",
    "over those",
)

Row = dict[str, Any]
Cells = Sequence[str]


class BenchRecord(NamedTuple):
    """A record: its header, and the rows of methods and of families."""

    header: Row
    rows: list[Row]
    families: list[Row]


def make_header(coordinates: int, parameters: int) -> Row:
    """The header for this commit, machine and time."""
    try:
        model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    name = model[1].strip() if model else platform.processor() or platform.machine()
    return {
        "kind": "bench",
        "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": describe_command(),
        "commit": commit(),
        "machine": f"{os.cpu_count()} cores of {name}, {platform.system()}",
        "jax": jax.__version__,
        "coordinates": coordinates,
        "parameters": parameters,
        "schema": SCHEMA,
    }


def read(folder: Path) -> BenchRecord:
    """The record in a folder.

    Raises:
      ExperimentError: If there is none.
    """
    try:
        rows = recording.read(folder)
        (header,) = of_kind(rows, "bench")
        methods, families = of_kind(rows, "bench_row"), of_kind(rows, "bench_memory")
        for row in families:
            row.setdefault("arguments", row.pop("given", None))
        found = BenchRecord(header, methods, families)
        write_readme(found)  # It reads every column.
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ExperimentError(f"{folder} is not a record of the bench: {reason}.") from error
    return found


def by_name(record: BenchRecord) -> dict[str, Row]:
    """The rows of methods by their names."""
    return {row["name"]: row for row in record.rows}


def newest_rows(folders: Sequence[Path], like: Row) -> dict[str, Row]:
    """Each row from the newest finished record in the folders that has the key of `like`."""
    found = []
    for path in (path for folder in folders for path in folder.glob(f"*/{recording.CONFIG}")):
        try:
            settings = recording.read_settings(path.parent)
            record = read(path.parent) if settings["finished"] else None
        except (KeyError, ExperimentError):
            continue
        if record and all(record.header[name] == like[name] for name in KEY):
            found.append(record)
    found.sort(key=lambda record: record.header["began"])
    return {name: row for record in found for name, row in by_name(record).items()}


def multiple(row: Row) -> float:
    """The time as a multiple of the baseline; NaN if the method is not timed."""
    return min(row["nanoseconds"]) / min(row["baseline"]) if row["nanoseconds"] else math.nan


def _noise(row: Row) -> float:
    """The factor by which the multiple grows without the best repeat of each."""
    best = (sorted(row[name])[:2] for name in ("nanoseconds", "baseline"))
    return math.prod(times[1] / times[0] for times in best if len(times) == 2)


def _worse(before: Row, after: Row) -> Iterator[str]:
    limit = max(SLOWER, _noise(before), _noise(after))
    was, now = multiple(before), multiple(after)
    if now > limit * was:
        yield f"{now:.2f} times the baseline, {was:.2f} before (noise: {limit:.2f} times)"
    was, now = before["compile_seconds"], after["compile_seconds"]
    if now > max(COMPILES_SLOWER * was, was + SECONDS):
        yield f"{now:.1f} s of cores to compile, {was:.1f} before"
    for name, title in COUNTS.items():
        if after[name] > before[name]:
            yield f"{after[name]:,} {title}, {before[name]:,} before"


def verdict(before: Mapping[str, Row], after: Sequence[Row]) -> list[str]:
    """The lines that report the comparison of the rows of both records."""
    pairs = [(before[row["name"]], row) for row in after if row["name"] in before]
    if not pairs:
        return ["No record with this machine, JAX and sizes has these rows: nothing is compared."]
    lines = [
        f"{now['name']}: {worse} ({was['commit'][:7]})"
        for was, now in pairs
        for worse in _worse(was, now)
    ]
    commits = ", ".join(sorted({was["commit"][:7] for was, _ in pairs}))
    result = f"{len(lines)} REGRESSIONS" if lines else "no regression"
    return [f"{len(pairs)} rows compared with {commits}: {result} above noise.", *lines]


def _shown(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def method_cells(rows: Sequence[Row], parameters: int) -> list[Cells]:
    """The lines of the table of methods."""
    return [
        (
            row["family"],
            row["name"],
            _shown(min(row["nanoseconds"], default=math.nan), ",.2f"),
            _shown(multiple(row), ",.1f"),
            _shown(GOALS.get(row["name"], math.nan), "g"),
            f"{row['accessed'] / parameters:,.1f}",
            f"{row['temporaries'] / parameters:,.1f}",
            f"{row['compile_seconds']:,.1f}",
            f"{row['lines']:,}",
            f"{row['collectives']}",
        )
        for row in rows
    ]


def family_cells(families: Sequence[Row]) -> list[Cells]:
    """The lines of the table of families, in megabytes."""
    return [
        (
            row["family"],
            row["name"],
            f"{1e-6 * row['arguments']:,.0f}",
            f"{1e-6 * row['peak']:,.0f}",
        )
        for row in families
    ]


def aligned(headings: Cells, lines: Sequence[Cells], left: int = 1) -> str:
    """A table for the terminal: `left` columns of text, then columns of numbers."""
    widths = [max(map(len, column)) for column in zip(headings, *lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in (headings, *lines)
    )


def write_readme(record: BenchRecord) -> str:
    """The text of the README; all its numbers are in the record."""
    header, rows, families = record
    baseline = min((each for row in rows for each in row["baseline"]), default=math.nan)
    parts = [
        "# What does each method cost on a core, in memory and in the compiler?",
        f"Commit {header['commit']}; "
        f"{header['began']}.\n{header['machine']}; JAX {header['jax']}. Command: "
        f"`{header['command']}`.\nVersions are in `environment.txt`, every setting in "
        "`config.json`, every number in `metrics.jsonl.gz`.",
        f"Times are of the whole update of {header['coordinates']:,} coordinates by one worker on "
        "one core: the minimum over repeats,\nin nanoseconds per coordinate and as a multiple of "
        "the baseline. The baseline is the simplest compression to int8 and\nback, which took "
        f"{baseline:.2f} ns per coordinate. The other columns are of the compiled step of one of 8 "
        f"workers with\n{header['parameters']:,} parameters. Bytes accessed and temporaries are "
        "bytes per parameter, with one iteration of each loop\nand all branches. Methods that mix "
        "parameters need several workers, and are not timed.",
        to_markdown(HEADINGS_OF_METHODS, method_cells(rows, header["parameters"]), left=2),
    ]
    if families:
        parts += [
            "Memory, in MB, of a step of one worker on one device, with "
            f"{header['parameters']:,} parameters: the arguments of the step, and the\npeak beside "
            "those, of the compiled program.",
            to_markdown(HEADINGS_OF_MEMORY, family_cells(families), left=2),
        ]
    return "\n\n".join(parts) + "\n"
