"""A record: what was run, where, and everything that was measured.

config.json      every setting, and whether the run finished
environment.txt  versions, machine, commit and command
metrics.jsonl    raw metrics, one object a line
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from experiments.cluster import is_first
from experiments.errors import ExperimentError, Interrupted
from experiments.launch import COMMAND
from experiments.metrics_rows import read_rows

PACKAGES = ("jax", "jaxlib", "optax", "flax", "numpy", "scikit-learn")
METRICS = "metrics.jsonl"
NO_RECORD = "none"


def commit() -> tuple[str, bool]:
    """The commit of this tree, and whether the tree has other changes; `unknown` without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ":/", ":!records")
        return git("rev-parse", "HEAD"), bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown", False


def describe_command() -> str:
    """The command that is running, as a user types it."""
    return os.environ.get(COMMAND) or shlex.join(["python", "-m", "experiments", *sys.argv[1:]])


def describe_environment() -> str:
    """Versions, machine, commit and command, a line each."""
    head, changed = commit()
    facts = {
        "command": describe_command(),
        "commit": head + (", with uncommitted changes" if changed else ""),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in PACKAGES},
        "platform": platform.platform(),
        "CPU count": os.cpu_count(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "NPROC": os.environ.get("NPROC"),
    }
    return "".join(f"{name}: {fact}\n" for name, fact in facts.items())


def _jsonable(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN or infinity: a loss that diverged is null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def read_metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The rows of one kind, `"step"`, `"run"` or `"estimate"`, in a record.

    Raises:
      ExperimentError: If there is no such record, or a line is no row of metrics.
    """
    return [row for row in read_rows(folder / METRICS) if row["kind"] == kind]


@contextlib.contextmanager
def _reporting_os_errors(path: Path) -> Iterator[None]:
    """Says in one line what the system refuses."""
    try:
        yield
    except OSError as error:
        raise ExperimentError(f"{path} cannot be written: {error.strerror}.") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file at once or not at all.

    Raises:
      ExperimentError: If it cannot be written; what was there before is left.
    """
    draft = path.with_name(f".{path.name}.draft")
    with _reporting_os_errors(path):
        try:
            draft.write_bytes(content)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def _new_folder(root: Path, name: str) -> Path:
    """`name` in `root`, or the first of `name_2`, `name_3`, ... that nobody else has made."""
    for number in itertools.count(1):
        folder = root / (name if number == 1 else f"{name}_{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("There is always another number.")


class Record:
    """A record folder that is valid at every moment.

    Used in a `with` statement. Until `finish`, its config says that it is not finished; an
    interrupt leaves it so, and becomes an `Interrupted` that says where it is.
    """

    def __init__(self, config: Any):
        """Makes the folder `<date>_<config.record>` in `config.records`.

        Raises:
          ExperimentError: If the folder cannot be made.
        """
        root, name = Path(config.records), f"{datetime.date.today()}_{config.record}"
        environment = describe_environment()
        try:
            root.mkdir(parents=True, exist_ok=True)
            self.folder = _new_folder(root, name)
        except OSError as error:
            raise ExperimentError(f"{root / name} cannot be made: {error.strerror}.") from error
        self._config = dataclasses.asdict(config)
        self._write_config(finished=False)
        self.write("environment.txt", environment)
        with _reporting_os_errors(self.folder / METRICS):
            self._metrics = (self.folder / METRICS).open("ab", buffering=0)

    def write(self, name: str, text: str) -> None:
        """Writes a file at once or not at all."""
        self.write_bytes(name, text.encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        """Writes a file that is no text, likewise."""
        write_atomically(self.folder / name, content)

    def _write_config(self, finished: bool) -> None:
        settings = {**self._config, "finished": finished}
        self.write("config.json", json.dumps(settings, indent=2) + "\n")

    def add(self, row: dict[str, Any]) -> None:
        """Appends one row of metrics, whole or not at all.

        Raises:
          ExperimentError: If there is no room for it; the rows before stay.
        """
        remaining = json.dumps(_jsonable(row), allow_nan=False).encode() + b"\n"
        end = self._metrics.seek(0, os.SEEK_END)
        with _reporting_os_errors(self.folder / METRICS):
            try:
                while remaining:  # A disk that fills up takes a part, and refuses the rest.
                    remaining = remaining[self._metrics.write(remaining) :]
            finally:
                if remaining:
                    self._metrics.truncate(end)

    def finish(self) -> None:
        """States that the record is whole."""
        self._write_config(finished=True)

    def __enter__(self) -> "Record":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._metrics.close()
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(f"{self.folder} is a partial record.") from error


class NoRecord:
    """Keeps nothing."""

    folder = None

    def write(self, name: str, text: str) -> None:
        """Does nothing."""

    def write_bytes(self, name: str, content: bytes) -> None:
        """Does nothing."""

    def add(self, row: dict[str, Any]) -> None:
        """Does nothing."""

    def finish(self) -> None:
        """Does nothing."""

    def __enter__(self) -> "NoRecord":
        return self

    def __exit__(self, *error: object) -> None:
        return None


def open_record(config: Any) -> Record | NoRecord:
    """The record that the config asks for; none where its name is `none`.

    Of the processes of a cluster, the first keeps it.
    """
    return NoRecord() if config.record == NO_RECORD or not is_first() else Record(config)
