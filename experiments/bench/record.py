"""The rows of a record of the bench.

- `bench`: the header: the start, command, commit, machine and JAX, `coordinates` of the timed
  updates, and `parameters` of the compiled programs.
- `bench_row`: a method: `nanoseconds`, the minimum per coordinate in each repeat, and those of the
  `baseline`, the simplest compression, in the same rounds; both are empty if it is not timed. The
  others are of `experiments.bench.programs.Program`, for one of eight workers.
- `bench_memory`: bytes of a single worker: see `experiments.bench.memory`.
"""

import datetime
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.cli.errors import ExperimentError
from experiments.study.record import METRICS, commit, describe_command
from experiments.study.rows import (
    Check,
    is_amount,
    is_count,
    is_measured,
    is_name,
    is_size,
    read_rows,
)
from experiments.study.store import read_settings
from experiments.study.tidy import is_missing

SCHEMA = 1
RENAMED = {"warm_up": "warmup", "exact_average": "periodic_averaging"}
"""New names of rows in older records."""

KEY = ("machine", "jax", "coordinates", "parameters", "schema")
"""What two records must share for a comparison of their numbers."""

COUNTS = {
    "lines": "HLO lines",
    "collectives": "collectives",
    "accessed": "bytes accessed",
    "temporaries": "bytes of temporaries",
}
"""Columns of a method that have no noise, and their names in a report."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_measured(value: Any) -> bool:
    return is_missing(value) or is_measured(value)


def _are_times(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_size, value))


CHECKS: Mapping[str, Mapping[str, Check]] = {
    "bench": {
        **dict.fromkeys(("began", "command", "commit", "machine", "jax"), _is_text),
        "changed": lambda value: isinstance(value, bool),
        **dict.fromkeys(("coordinates", "parameters", "schema"), is_count),
    },
    "bench_row": {
        **dict.fromkeys(("family", "name"), is_name),
        **dict.fromkeys(("nanoseconds", "baseline"), _are_times),
        **dict.fromkeys(("compile_seconds", *COUNTS), is_amount),
    },
    "bench_memory": {
        **dict.fromkeys(("family", "name"), is_name),
        **dict.fromkeys(("arguments", "peak", "resident"), _is_measured),
    },
}
"""The columns per kind, and which values each allows."""

Row = dict[str, Any]


class BenchRecord(NamedTuple):
    """A record: its header, and the rows of methods and of families."""

    header: Row
    rows: Sequence[Row]
    families: Sequence[Row] = ()


def _second_best_ratio(repeats: Sequence[float]) -> float:
    """The second smallest value over the smallest; 1 for fewer than two values."""
    least, second = sorted(repeats)[:2] if len(repeats) > 1 else (1.0, 1.0)
    return second / least


def multiple(row: Row) -> float:
    """The time as a multiple of the baseline; NaN if the method is not timed."""
    return min(row["nanoseconds"]) / min(row["baseline"]) if row["nanoseconds"] else math.nan


def noise(row: Row) -> float:
    """The factor by which the multiple grows without the best repeat of each."""
    return _second_best_ratio(row["nanoseconds"]) * _second_best_ratio(row["baseline"])


def machine() -> str:
    """The number of cores, the processor and the operating system."""
    try:
        model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    name = model[1].strip() if model else platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores of {name}, {platform.system()}"


def make_header(coordinates: int, parameters: int) -> Row:
    """The header for this commit, machine and time."""
    head, changed = commit()
    return {
        "kind": "bench",
        "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": describe_command(),
        "commit": head,
        "changed": changed,
        "machine": machine(),
        "jax": jax.__version__,
        "coordinates": coordinates,
        "parameters": parameters,
        "schema": SCHEMA,
    }


def read(folder: Path) -> BenchRecord:
    """The record in a folder.

    Raises:
      ExperimentError: If there is none, it has another schema, or a row lacks a column or has a
        value that is not allowed.
    """
    rows: dict[str, list[Row]] = {kind: [] for kind in CHECKS}
    for row in read_rows(folder / METRICS):
        for name, is_correct in CHECKS.get(row["kind"], {}).items():
            if name not in row:
                raise ExperimentError(
                    f"{folder} has a row of kind {row['kind']} that lacks a column."
                )
            if not is_correct(row[name]):
                raise ExperimentError(
                    f"{folder} has a row of kind {row['kind']} whose `{name}` is "
                    f"{str(row[name])[:40]!r}, which is not allowed."
                )
        if bool(row.get("nanoseconds")) != bool(row.get("baseline")):
            raise ExperimentError(f"{folder} has a row with times of a method or baseline only.")
        rows.setdefault(row["kind"], []).append(row)
    headers = rows["bench"]
    if len(headers) != 1 or headers[0]["schema"] != SCHEMA:
        raise ExperimentError(f"{folder} is not a record of the bench with schema {SCHEMA}.")
    return BenchRecord(headers[0], rows["bench_row"], rows["bench_memory"])


def _finished(folder: Path) -> list[BenchRecord]:
    """The record in a folder, if it is finished and has this schema."""
    try:
        return [read(folder)] if read_settings(folder).get("finished") else []
    except ExperimentError:
        return []


def newest_rows(records: Path, like: Row) -> dict[str, Row]:
    """Each row from the newest finished record with it whose key is that of `like`."""
    folders = {path.parent for path in records.glob(f"*/{METRICS}")}
    finished = [record for folder in folders for record in _finished(folder)]
    comparable = [each for each in finished if all(each.header[name] == like[name] for name in KEY)]
    comparable.sort(key=lambda record: record.header["began"])
    rows = [row for record in comparable for row in record.rows]
    return {RENAMED.get(row["name"], row["name"]): row for row in rows}
