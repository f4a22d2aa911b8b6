"""JSON of records, which others may have written: of bounded size and depth, and strict."""

import json
from pathlib import Path
from typing import Any

from experiments.cli.errors import ExperimentError
from experiments.tasks.data.base import MAX_PARSED_BYTES, read_bytes

MAX_DEPTH = 8
"""Of brackets within brackets. Functions that recurse into a parsed value rely on it."""


def _not_finite(name: str) -> float:
    raise ValueError(f"{name} is not valid JSON")


def _require_flat(value: Any) -> None:
    """Checks `MAX_DEPTH` without recursion."""
    layer, depth = [value], 0
    while layer := [each for each in layer if isinstance(each, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError("too many brackets")
        layer = [x for each in layer for x in (each.values() if type(each) is dict else each)]


def parse_json(raw: bytes) -> Any:
    """The value of a JSON text, of at most `MAX_DEPTH` levels, and without NaN and infinity.

    Raises:
      ValueError: If the text is not such JSON.
    """
    try:
        value = json.loads(raw, parse_constant=_not_finite)
    except RecursionError as error:
        raise ValueError("too many brackets") from error
    _require_flat(value)
    return value


def read_parsed(path: Path) -> bytes:
    """The contents of a file that is then parsed.

    Raises:
      ExperimentError: If the file cannot be read, or has more than `MAX_PARSED_BYTES`.
    """
    return read_bytes(path, MAX_PARSED_BYTES)


def read_utf8(path: Path) -> str:
    """The text of a file.

    Raises:
      ExperimentError: If the file cannot be read, or is not UTF-8.
    """
    try:
        return read_parsed(path).decode()
    except UnicodeDecodeError as error:
        raise ExperimentError(f"{path} is not UTF-8 text: {error.reason}.") from error
