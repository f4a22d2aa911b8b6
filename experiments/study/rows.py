"""Reads rows of metrics, one JSON object per line, and checks the columns of each kind."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.cli.errors import ExperimentError
from experiments.study.json_files import parse_json, read_parsed
from experiments.study.tidy import LARGEST
from experiments.training.diagnostics import RECORDED_MAXIMA

RENAMED: Mapping[str, Mapping[str, str]] = {
    "run": {f"most_{name}": f"max_{name}" for name in RECORDED_MAXIMA},
    "density": {"own": "worker", "own_share": "worker_shard", "union_share": "union_shard"},
    "bench_memory": {"given": "arguments"},
}
"""Per kind, columns of older records and their names now."""

_NAME = re.compile(r"[A-Za-z0-9 _.,:;%+=()/-]{1,80}")  # Matplotlib parses other names as formulas.

Check = Callable[[Any], bool]


def is_name(value: Any) -> bool:
    """Whether the value is a short text that Matplotlib draws as it is."""
    return isinstance(value, str) and bool(_NAME.fullmatch(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """Whether the value is an integer of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def is_amount(value: Any) -> bool:
    """Whether the value is a number of at least 0."""
    return _is_number(value) and 0 <= value <= LARGEST


def is_size(value: Any) -> bool:
    """Whether the value is a number above 0."""
    return is_amount(value) and value > 0


def is_measured(value: Any) -> bool:
    """Whether the value is a number, or None or NaN where it is not finite."""
    return value is None or (_is_number(value) and abs(value) <= LARGEST)


def _is_loss(value: Any) -> bool:
    return value is None or is_amount(value)


RULES: Mapping[Check, str] = {
    is_name: "a short name of letters and digits",
    is_count: "an integer of at least 0",
    is_amount: "a number of at least 0",
    is_size: "a number above 0",
    is_measured: "a number, or null where it is not finite",
    _is_loss: "a number of at least 0, or null where it is not finite",
}

_RUN_KEYS = {"method": is_name, "optimizer": is_name, "seed": is_count}
_STRAGGLER_KEYS = {"dataset": is_name, "speeds": is_name, "strategy": is_name}

COLUMNS: Mapping[str, Mapping[str, Check]] = {
    "step": {**_RUN_KEYS, "bytes_sent": is_amount, "train_loss": _is_loss},
    "run": {
        **_RUN_KEYS,
        "train_loss": _is_loss,
        "test_loss": _is_loss,
        "test_accuracy": _is_loss,
        "bytes_per_step": is_amount,
        "compression_error": _is_loss,
        "step_milliseconds": _is_loss,
    },
    "tuning": {**_RUN_KEYS, "learning_rate": is_amount, "validation_loss": _is_loss},
    "straggler": {
        **_STRAGGLER_KEYS,
        "seed": is_count,
        "seconds": is_size,
        "train_loss": _is_loss,
    },
    "straggler_run": {
        **_STRAGGLER_KEYS,
        "seed": is_count,
        "learning_rate": is_amount,
        "train_loss": _is_loss,
    },
}
"""The columns per kind that figures and tables read. Other columns and kinds are allowed."""

OPTIONAL: Mapping[str, Mapping[str, Check]] = {
    "run": {
        "learning_rate": is_amount,
        **{f"max_{name}": is_measured for name in RECORDED_MAXIMA},
    }
}
"""Columns that some rows of a kind lack."""


def parse_object(line: bytes) -> dict[str, Any]:
    """An object with a kind.

    Raises:
      ValueError: If the line is not such an object.
    """
    row = parse_json(line)
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        raise ValueError("not an object with a kind")
    return row


def _parse(line: bytes) -> dict[str, Any]:
    """One row of an older record; null becomes NaN."""
    row = parse_object(line)
    kind = row["kind"]
    row = {RENAMED.get(kind, {}).get(name, name): value for name, value in row.items()}
    if missing := [name for name in COLUMNS.get(kind, {}) if name not in row]:
        raise ValueError(f"a row of kind {kind!r} without `{missing[0]}`")
    for name, is_correct in {**COLUMNS.get(kind, {}), **OPTIONAL.get(kind, {})}.items():
        if name in row and not is_correct(row[name]):
            raise ValueError(f"`{name}` must be {RULES[is_correct]}, got {str(row[name])[:40]!r}")
    return {name: math.nan if value is None else value for name, value in row.items()}


def read_lines(path: Path) -> list[bytes]:
    """The lines of a file, with their ends.

    Raises:
      ExperimentError: If the file cannot be read, or is too large.
    """
    return read_parsed(path).splitlines(keepends=True)


def parse_lines(
    path: Path, lines: Sequence[bytes], parse: Callable[[bytes], dict[str, Any]] = _parse
) -> list[dict[str, Any]]:
    """The rows of the lines of a file.

    Raises:
      ExperimentError: If a line is not a valid row.
    """
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(parse(line))
        except ValueError as error:
            raise ExperimentError(
                f"{path} line {number} is not a valid row of metrics: {error}. Remove the line or "
                "repeat the run."
            ) from error
    return rows


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of metrics of an older record, or of the bench.

    Raises:
      ExperimentError: If the file cannot be read, or a line is not a valid row.
    """
    return parse_lines(path, read_lines(path))
