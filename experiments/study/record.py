"""Records: a folder with the settings, the environment and the raw metrics of a run.

config.json      every setting, and whether the run finished
environment.txt  versions, machine, commit and command
metrics.jsonl    raw metrics, one JSON object per line
"""

import dataclasses
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from experiments.cli.errors import ExperimentError, Interrupted
from experiments.cli.launch import COMMAND
from experiments.study.files import reporting_os_errors, write_atomically
from experiments.training.cluster import is_main_process

PACKAGES = ("jax", "jaxlib", "optax", "flax", "numpy", "scikit-learn")
OPTIONAL = ("torch",)
METRICS = "metrics.jsonl"
NO_RECORD = "none"


def commit() -> tuple[str, bool]:
    """The commit of this tree, and whether there are uncommitted changes; `unknown` without git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parents[1],
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
    """The running command as the user typed it."""
    return os.environ.get(COMMAND) or shlex.join(["python", "-m", "experiments", *sys.argv[1:]])


def describe_environment() -> str:
    """Versions, machine, commit and command, one per line."""
    head, changed = commit()
    found = [package for package in OPTIONAL if importlib.util.find_spec(package)]
    facts = {
        "command": describe_command(),
        "commit": head + (", with uncommitted changes" if changed else ""),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in (*PACKAGES, *found)},
        "platform": platform.platform(),
        "CPU count": os.cpu_count(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "NPROC": os.environ.get("NPROC"),
    }
    return "".join(f"{name}: {fact}\n" for name, fact in facts.items())


def _jsonable(row: dict[str, Any]) -> dict[str, Any]:
    """Replaces NaN and infinity, which JSON lacks, by null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def _new_folder(root: Path, name: str) -> Path:
    """Creates `name` in `root`, or the first of `name_2`, `name_3`, ... that does not exist."""
    for number in itertools.count(1):
        folder = root / (name if number == 1 else f"{name}_{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("There is always another number.")


class Record:
    """A record folder that is valid at any time.

    Used in a `with` statement. Until `finish`, the config states that the record is not finished.
    An interrupt leaves this state and is converted to an `Interrupted` that names the folder.
    """

    def __init__(self, config: Any, **more: str):
        """Creates the folder `<date>_<config.record>` in `config.records`.

        Args:
          config: The settings, written to `config.json`.
          **more: More settings that `config.json` has.

        Raises:
          ExperimentError: If the folder cannot be created.
        """
        root, name = Path(config.records), f"{datetime.date.today()}_{config.record}"
        environment = describe_environment()
        try:
            root.mkdir(parents=True, exist_ok=True)
            self.folder = _new_folder(root, name)
        except OSError as error:
            raise ExperimentError(f"{root / name} cannot be made: {error.strerror}.") from error
        self._config = {**more, **dataclasses.asdict(config)}
        self._write_config(finished=False)
        self.write("environment.txt", environment)
        with reporting_os_errors(self.folder / METRICS):
            self._metrics = (self.folder / METRICS).open("ab", buffering=0)

    def write(self, name: str, content: str | bytes) -> None:
        """Writes a file atomically."""
        encoded = content.encode() if isinstance(content, str) else content
        write_atomically(self.folder / name, encoded)

    def _write_config(self, finished: bool) -> None:
        settings = {**self._config, "finished": finished}
        self.write("config.json", json.dumps(settings, indent=2) + "\n")

    def add(self, row: dict[str, Any]) -> None:
        """Appends one row of metrics atomically.

        Raises:
          ExperimentError: If the row cannot be written. Earlier rows are unchanged.
        """
        remaining = json.dumps(_jsonable(row), allow_nan=False).encode() + b"\n"
        end = self._metrics.seek(0, os.SEEK_END)
        with reporting_os_errors(self.folder / METRICS):
            try:
                while remaining:  # A full disk may accept only a part.
                    remaining = remaining[self._metrics.write(remaining) :]
            finally:
                if remaining:
                    self._metrics.truncate(end)

    def finish(self) -> None:
        """Marks the record as finished."""
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
    """A record that writes nothing."""

    folder = None

    def write(self, name: str, content: str | bytes) -> None:
        """Does nothing."""

    def add(self, row: dict[str, Any]) -> None:
        """Does nothing."""

    def finish(self) -> None:
        """Does nothing."""

    def __enter__(self) -> "NoRecord":
        return self

    def __exit__(self, *error: object) -> None:
        return None


def open_record(config: Any, **more: str) -> Record | NoRecord:
    """Opens the record of the config, or a `NoRecord` for the name `none`.

    In a cluster, only the first process writes a record.
    """
    if config.record == NO_RECORD or not is_main_process():
        return NoRecord()
    return Record(config, **more)
