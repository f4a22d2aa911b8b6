"""Writes files atomically, with errors in one line."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from experiments.cli.errors import ExperimentError


@contextlib.contextmanager
def reporting_os_errors(path: Path) -> Iterator[None]:
    """Reports an error of the operating system in one line."""
    try:
        yield
    except OSError as error:
        raise ExperimentError(f"{path} cannot be written: {error.strerror}.") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file atomically.

    Raises:
      ExperimentError: If the file cannot be written. An existing file is then unchanged.
    """
    draft = path.with_name(f".{path.name}.draft")
    with reporting_os_errors(path):
        try:
            draft.write_bytes(content)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
