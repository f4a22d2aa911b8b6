"""Reads, repairs and continues the record of a study."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from experiments.cli.errors import ExperimentError
from experiments.cli.options import is_allowed
from experiments.study import record as recording
from experiments.study.files import write_atomically
from experiments.study.json_files import parse_json, read_parsed, read_utf8
from experiments.study.rows import is_name, parse_lines, parse_object, read_lines
from experiments.study.tidy import LARGEST, SCHEMA, Row, migrate

CLAIMS = "claims.md"
_KINDS = ("point", "run", "trial", "fact")
_OF_THE_MACHINE = ("record", "records", "resume", "distributed", "start_timeout")
"""Options that only say where the record is, or how the processes start."""


def _check(value: Any) -> Any:
    """The value, with NaN for null."""
    if value is None:
        return math.nan
    if isinstance(value, list):
        return [_check(each) for each in value]
    is_number = isinstance(value, int | float)
    if not (value == "" or is_name(value) or (is_number and abs(value) <= LARGEST)):
        shown = str(value)[:40]
        raise ValueError(f"{shown!r} is not a short name of letters and digits, or a number")
    return value


def parse(line: bytes) -> Row:
    """One row of the schema.

    Raises:
      ValueError: If the line is not such a row.
    """
    row = parse_object(line)
    if row.get("schema") != SCHEMA or row["kind"] not in _KINDS:
        raise ValueError(f"not a row of schema {SCHEMA}")
    return {name: _check(value) for name, value in row.items()}


def read(folder: Path) -> list[Row]:
    """The rows of a record in the schema; those of older records are converted.

    Raises:
      ExperimentError: If the file cannot be read, or a line is not a valid row.
    """
    path = folder / recording.METRICS
    lines = read_lines(path)
    if lines and b'"schema"' in lines[0]:
        return parse_lines(path, lines, parse)
    return migrate(parse_lines(path, lines))


def read_interrupted(folder: Path) -> tuple[list[Row], bytes]:
    """The rows of an interrupted record that a study can continue, and their lines.

    A torn last line, and points of a run that did not end, are excluded.

    Raises:
      ExperimentError: If the file cannot be read, or a line is not a valid row.
    """
    path = folder / recording.METRICS
    lines = [line for line in read_lines(path) if line.endswith(b"\n")]
    rows = parse_lines(path, lines, parse)
    # The points of a run are written before its end, so those after the last end have none.
    last = max((n for n, row in enumerate(rows) if row["kind"] != "point"), default=-1)
    return rows[: last + 1], b"".join(lines[: last + 1])


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def environment(folder: Path) -> str:
    """The text of `environment.txt`.

    Raises:
      ExperimentError: If the file cannot be read.
    """
    return read_utf8(folder / "environment.txt")


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings in `config.json`.

    Raises:
      ExperimentError: If the file cannot be read.
    """
    path = folder / "config.json"
    try:
        settings = parse_json(read_parsed(path))
    except ValueError as error:
        raise ExperimentError(f"{path} is not a config: {error}.") from error
    if not isinstance(settings, dict):
        raise ExperimentError(f"{folder} is not a record of this study.")
    return {name: _as_tuples(value) for name, value in settings.items()}


def read_config(config: type, folder: Path) -> Any:
    """The config of a record. Options that an older record lacks have their defaults.

    Raises:
      ExperimentError: If the file cannot be read.
    """
    settings, fields = read_settings(folder), dataclasses.fields(config)
    return config(**{each.name: settings[each.name] for each in fields if each.name in settings})


def resumed_config(config: Any, folder: Path) -> Any:
    """The config of a record. Options that `config` sets must have the values of the record.

    Raises:
      ExperimentError: If the folder is not a record of this study, or an option differs or has a
        value in the record that is not allowed.
    """
    settings, fields = read_settings(folder), dataclasses.fields(config)
    if any(field.name not in settings for field in fields):
        raise ExperimentError(f"{folder} is not a record of this study.")
    recorded = {}
    for field in fields:
        value, recorded[field.name] = getattr(config, field.name), settings[field.name]
        option = field.name.replace("_", "-")
        if not is_allowed(field, recorded[field.name]):
            shown = str(recorded[field.name])[:40]
            raise ExperimentError(
                f"--{option} is {shown} in {folder}, which is not allowed. Begin a new record."
            )
        is_free = field.name in _OF_THE_MACHINE
        if not is_free and value not in (field.default, recorded[field.name]):
            raise ExperimentError(
                f"--{option} is {recorded[field.name]} in {folder}, got {value}. Omit the option "
                "or begin a new record."
            )
    return dataclasses.replace(config, **recorded)


class ResumedRecord(recording.Record):
    """A record that continues where it stopped.

    Attributes:
      rows: The rows that it has.
    """

    def __init__(self, config: Any, folder: Path):
        """Removes incomplete rows, and adds this environment to `environment.txt`.

        Raises:
          ExperimentError: If the record cannot be read or written.
        """
        self.folder, self._config = folder, {**read_settings(folder), **dataclasses.asdict(config)}
        self.rows, content = read_interrupted(folder)
        write_atomically(folder / recording.METRICS, content)
        described = f"{environment(folder)}\n{recording.describe_environment()}"
        self.write("environment.txt", described)
        self._write_config(finished=False)
        self._metrics = (folder / recording.METRICS).open("ab", buffering=0)


def require_claims(folder: Path, stated: str) -> None:
    """Checks that the claims of a continued record are those stated before its first run.

    Raises:
      ExperimentError: If they differ.
    """
    path = folder / CLAIMS
    if path.exists() and read_utf8(path) != stated:
        raise ExperimentError(
            f"The claims of the study are not those of {path}, which were stated before the run. "
            "Begin a new record."
        )
