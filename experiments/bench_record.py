"""The rows of a record of the bench: one schema for what is printed, compared and told.

A row of kind `bench` says where and of what; one of kind `bench_row` is a method's, and one of kind
`bench_memory` a family's.
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

from experiments.errors import ExperimentError
from experiments.recording import METRICS, commit, describe_command, read_metrics

SCHEMA = 1

RENAMED = {"warm_up": "warmup", "exact_average": "periodic_averaging"}
"""Rows of older records that have another name now."""


class Header(NamedTuple):
    """Where and of what.

    Attributes:
      began: As ISO 8601 writes it, in UTC.
      commit: The hash alone.
      changed: Whether the tree had other changes.
      machine: In words.
      coordinates: Of the updates that are timed.
      parameters: Of the programs.
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
        """What has to be alike in two records, that their numbers may be compared."""
        return self.machine, self.jax, self.coordinates, self.parameters, self.schema


def _second_best_ratio(repeats: Sequence[float]) -> float:
    """The least but one, as a multiple of the least; 1 of fewer than two."""
    least, second = sorted(repeats)[:2] if len(repeats) > 1 else (1.0, 1.0)
    return second / least


class Row(NamedTuple):
    """A method.

    Attributes:
      nanoseconds: The least a coordinate, in each repeat; of what is not timed, none.
      baseline: Those of the plainest compression, in the same turns.
      commit: Of the record that it is from.
      The others: As of `experiments.bench_programs.Program`, for one of eight workers.
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
        """Of the baseline; NaN of what is not timed."""
        return min(self.nanoseconds) / min(self.baseline) if self.nanoseconds else math.nan

    @property
    def noise(self) -> float:
        """How many times as large the multiple is if the best repeat of each had not been."""
        return _second_best_ratio(self.nanoseconds) * _second_best_ratio(self.baseline)


class Family(NamedTuple):
    """Bytes of one worker without others: see `experiments.bench_memory`."""

    family: str
    name: str
    given: int
    peak: int
    resident: float = math.nan


class BenchRecord(NamedTuple):
    """A record."""

    header: Header
    rows: Sequence[Row]
    families: Sequence[Family]


def machine() -> str:
    """The processor, how many of it, and the system."""
    try:
        model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    name = model[1].strip() if model else platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores of {name}, {platform.system()}"


def header(coordinates: int, parameters: int) -> Header:
    """Of this commit, machine and moment."""
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
    """For `metrics.jsonl`."""
    return {"kind": kind, **value._asdict()}


def _of_kind(folder: Path, kind: str, type_: Any) -> list[Any]:
    return [
        type_(**{name: row[name] for name in type_._fields if name in row})
        for row in read_metrics(folder, kind)
    ]


def read(folder: Path) -> BenchRecord:
    """The record in a folder.

    Raises:
      ExperimentError: If there is none, or it is not of this schema.
    """
    headers = _of_kind(folder, "bench", Header)
    if len(headers) != 1 or headers[0].schema != SCHEMA:
        raise ExperimentError(f"{folder} is no record of the bench of schema {SCHEMA}.")
    return BenchRecord(
        headers[0], _of_kind(folder, "bench_row", Row), _of_kind(folder, "bench_memory", Family)
    )


def _finished(folder: Path) -> list[BenchRecord]:
    """The record in a folder, if it is whole and of this schema."""
    try:
        finished = json.loads((folder / "config.json").read_text())["finished"]
        return [read(folder)] if finished else []
    except (OSError, ValueError, KeyError, ExperimentError):
        return []


def newest_rows(records: Path, like: Header) -> dict[str, Row]:
    """Each row of the newest finished record in `records` that has it, and is of one kind."""
    folders = {path.parent for path in records.glob(f"*/{METRICS}")}
    found = [record for folder in folders for record in _finished(folder)]
    comparable = [record for record in found if record.header.kind == like.kind]
    comparable.sort(key=lambda record: record.header.began)
    rows = [row for record in comparable for row in record.rows]
    return {name: row for row in rows for name in [RENAMED.get(row.name, row.name)]}
