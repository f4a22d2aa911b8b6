"""The schema of a record of the bench, for tables, comparisons and READMEs.

A row of kind `bench` is the header, a row of kind `bench_row` a method, and a row of kind
`bench_memory` a family.
"""

import datetime
import json
import math
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.cli.errors import ExperimentError
from experiments.study.record import METRICS, commit, describe_command, read_metrics

SCHEMA = 1

RENAMED = {"warm_up": "warmup", "exact_average": "periodic_averaging"}
"""New names of rows in older records."""


class Header(NamedTuple):
    """The environment and sizes of a record.

    Attributes:
      began: The start in UTC, in ISO 8601.
      commit: The hash.
      changed: Whether there were uncommitted changes.
      machine: A description of the machine.
      coordinates: Coordinates of the timed updates.
      parameters: Parameters of the compiled programs.
    """

    began: str
    command: str
    commit: str
    changed: bool
    machine: str
    jax: str
    coordinates: int
    parameters: int
    schema: int = SCHEMA

    @property
    def kind(self) -> tuple[Any, ...]:
        """The key that two records must share for a comparison of their numbers."""
        return self.machine, self.jax, self.coordinates, self.parameters, self.schema


def _second_best_ratio(repeats: Sequence[float]) -> float:
    """The second smallest value over the smallest; 1 for fewer than two values."""
    least, second = sorted(repeats)[:2] if len(repeats) > 1 else (1.0, 1.0)
    return second / least


class Row(NamedTuple):
    """The measurements of a method.

    Attributes:
      nanoseconds: The minimum per coordinate in each repeat; empty if the row is not timed.
      baseline: Those of the baseline, the simplest compression, in the same rounds.
      commit: The commit of the record of this row.
      The others: See `experiments.bench.programs.Program`, for one of eight workers.
    """

    family: str
    name: str
    nanoseconds: Sequence[float]
    baseline: Sequence[float]
    compile_seconds: float
    lines: int
    collectives: int
    accessed: int
    temporaries: int
    commit: str

    @property
    def multiple(self) -> float:
        """The time as a multiple of the baseline; NaN if the row is not timed."""
        return min(self.nanoseconds) / min(self.baseline) if self.nanoseconds else math.nan

    @property
    def noise(self) -> float:
        """The factor by which the multiple grows without the best repeat of each."""
        return _second_best_ratio(self.nanoseconds) * _second_best_ratio(self.baseline)


class Family(NamedTuple):
    """Bytes of a single worker: see `experiments.bench.memory`."""

    family: str
    name: str
    arguments: int
    peak: int
    resident: float = math.nan


class BenchRecord(NamedTuple):
    """A record."""

    header: Header
    rows: Sequence[Row]
    families: Sequence[Family]


def machine() -> str:
    """The number of cores, the processor and the operating system."""
    try:
        model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    name = model[1].strip() if model else platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores of {name}, {platform.system()}"


def header(coordinates: int, parameters: int) -> Header:
    """The header for this commit, machine and time."""
    return Header(
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        describe_command(),
        *commit(),
        machine(),
        jax.__version__,
        coordinates,
        parameters,
    )


def to_row(kind: str, value: Header | Row | Family) -> dict[str, Any]:
    """A row of `metrics.jsonl`."""
    return {"kind": kind, **value._asdict()}


def _of_kind(folder: Path, kind: str, type_: Any) -> list[Any]:
    return [
        type_(**{name: row[name] for name in type_._fields if name in row})
        for row in read_metrics(folder, kind)
    ]


def read(folder: Path) -> BenchRecord:
    """The record in a folder.

    Raises:
      ExperimentError: If there is none, or it has another schema.
    """
    headers = _of_kind(folder, "bench", Header)
    if len(headers) != 1 or headers[0].schema != SCHEMA:
        raise ExperimentError(f"{folder} is not a record of the bench with schema {SCHEMA}.")
    return BenchRecord(
        headers[0], _of_kind(folder, "bench_row", Row), _of_kind(folder, "bench_memory", Family)
    )


def _finished(folder: Path) -> list[BenchRecord]:
    """The record in a folder, if it is finished and has this schema."""
    try:
        finished = json.loads((folder / "config.json").read_text())["finished"]
        return [read(folder)] if finished else []
    except (OSError, ValueError, KeyError, ExperimentError):
        return []


def newest_rows(records: Path, like: Header) -> dict[str, Row]:
    """Each row from the newest finished record with it whose key is that of `like`."""
    folders = {path.parent for path in records.glob(f"*/{METRICS}")}
    finished = [record for folder in folders for record in _finished(folder)]
    comparable = [record for record in finished if record.header.kind == like.kind]
    comparable.sort(key=lambda record: record.header.began)
    rows = [row for record in comparable for row in record.rows]
    return {name: row for row in rows for name in [RENAMED.get(row.name, row.name)]}
