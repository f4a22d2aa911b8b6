"""Records: a folder with the settings, the environment and the raw rows of a study.

config.json         every setting, and whether the study finished
environment.txt     versions, machine, commit and command
claims.md           the claims, from before the first run
metrics.jsonl[.gz]  raw rows, one JSON object per line; compressed when the study has finished

A row has a `kind`, the keys of its setting (such as `graph` and `method`), the tuned parameters,
the measured values and, except for facts, `seed`.

- `point`: a logged point of a run, such as the loss after a step.
- `run`: the end of a run.
- `trial`: one run of the tuning, with its validation loss.
- `fact`: a measurement that no seed changes, such as the bytes of a method. `about` names it.
"""

import contextlib
import dataclasses
import datetime
import gzip
import importlib.metadata
import itertools
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from experiments.cluster import is_main_process
from experiments.errors import ExperimentError, Interrupted

Kind = Literal["point", "run", "trial", "fact"]
Row = dict[str, Any]

LARGEST = 1e30
"""The largest magnitude in a row. Its square, and sums of such squares, are finite."""

METRICS, CONFIG = "metrics.jsonl", "config.json"
ENVIRONMENT, CLAIMS = "environment.txt", "claims.md"
PACKAGES = ("jax", "jaxlib", "optax", "flax", "numpy", "scikit-learn", "torch")
OF_THE_MACHINE = ("record", "records", "resume", "distributed", "start_timeout")
"""Options that only say where the record is, or how the processes start."""


def is_missing(value: Any) -> bool:
    """Whether a value is None or NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _plain(value: Any) -> Any:
    """The value as it is read back from a record: no NumPy types, and NaN if it diverged."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not abs(value) <= LARGEST:
        return math.nan
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def make_row(kind: Kind, keys: Mapping[str, Any], values: Mapping[str, Any]) -> Row:
    """A row of the keys and the values, whose names differ.

    Example:
      >>> make_row("run", {"method": "mean", "seed": 0}, {"train_loss": np.float32(0.5)})
      {'kind': 'run', 'method': 'mean', 'seed': 0, 'train_loss': 0.5}
    """
    if twice := keys.keys() & values.keys():
        raise ValueError(f"`{min(twice)}` is the name of more than one column of a row.")
    return {"kind": kind, **{name: _plain(each) for name, each in {**keys, **values}.items()}}


def of_kind(rows: Iterable[Row], kind: Kind) -> list[Row]:
    """The rows of one kind."""
    return [row for row in rows if row["kind"] == kind]


def grouped(rows: Iterable[Row], names: Sequence[str]) -> dict[tuple, list[Row]]:
    """The rows by their values of `names`, in the order of first occurrence.

    Rows without one of these columns are in no group.
    """
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        if all(name in row for name in names):
            groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file, or leaves an existing one unchanged."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of a record, and `study` and `finished`; an error if the folder is not one."""
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return {name: _as_tuples(value) for name, value in settings.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise ExperimentError(f"{folder} is not a record: {error}.") from error


def read_config(config: type, folder: Path) -> Any:
    """The config of a record. Options that an older record lacks have their defaults."""
    settings, fields = read_settings(folder), dataclasses.fields(config)
    return config(**{each.name: settings[each.name] for each in fields if each.name in settings})


def read_environment(folder: Path) -> str:
    """The text of `environment.txt`."""
    return (folder / ENVIRONMENT).read_text(encoding="utf-8")


def read(folder: Path) -> list[Row]:
    """The rows of a record, with NaN for null; a last line that is not whole is no row.

    It is an error if the file cannot be read, or another line is not a row.
    """
    path, compressed, rows = folder / METRICS, folder / f"{METRICS}.gz", []
    try:
        content = path.read_bytes() if path.exists() else gzip.decompress(compressed.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise ExperimentError(f"{compressed} is no record: {error}.") from error
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            row = {n: math.nan if each is None else each for n, each in json.loads(line).items()}
            rows.append({"kind": row.pop("kind"), **row})
        except (ValueError, AttributeError, KeyError) as error:
            raise ExperimentError(f"{path} line {number} is not a row: {error!r}.") from error
    return rows


def commit() -> str:
    """The commit of this tree, and whether there are uncommitted changes; `unknown` without git."""

    def git(*arguments: str) -> str:
        command, folder = ["git", *arguments], Path(__file__).parents[1]
        return subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout.decode()

    try:
        changed = git("status", "--porcelain", "--", ":/", ":!records")
        return git("rev-parse", "HEAD").strip() + (", with uncommitted changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def describe_command() -> str:
    """The running command as the user typed it."""
    return shlex.join(["python", "-m", "experiments", *sys.argv[1:]])


def describe_environment() -> str:
    """Versions, machine, commit and command, one per line."""
    versions = {each.name: each.version for each in importlib.metadata.distributions()}
    facts = {
        "command": describe_command(),
        "commit": commit(),
        "python": platform.python_version(),
        **{package: versions[package] for package in PACKAGES if package in versions},
        "platform": platform.platform(),
        "CPU count": os.cpu_count(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "NPROC": os.environ.get("NPROC"),
    }
    return "".join(f"{name}: {fact}\n" for name, fact in facts.items())


class Record(contextlib.AbstractContextManager):
    """A record that is valid at any time; without a folder, it keeps nothing.

    Until `finish`, the config states that the study is not finished. An interrupt in its `with`
    statement leaves this state, and becomes an `Interrupted` that names the folder. `rows` are all
    rows, also those of the earlier runs of a record that is continued.
    """

    def __init__(self, folder: Path | None, config: Any = None, study: str = ""):
        """Writes the config and the environment."""
        self.folder, self.rows = folder, []
        if folder is None:
            return
        self._config = {"study": study, **dataclasses.asdict(config)}
        environment = describe_environment()
        if (folder / CONFIG).exists():
            rows = read(folder)
            # The points of a run are written before its end: those after the last end have none.
            last = max((n for n, row in enumerate(rows) if row["kind"] != "point"), default=-1)
            self.rows = rows[: last + 1]
            environment = f"{read_environment(folder)}\n{environment}"
        self.write(ENVIRONMENT, environment)
        self._write_config(finished=False)
        self.write(METRICS, b"".join(map(self._line, self.rows)))
        (folder / f"{METRICS}.gz").unlink(missing_ok=True)

    @property
    def environment(self) -> str:
        """The text of `environment.txt`; without a folder, of this process."""
        return read_environment(self.folder) if self.folder else describe_environment()

    @staticmethod
    def _line(row: Row) -> bytes:
        finite = {n: None if is_missing(each) else each for n, each in row.items()}
        return json.dumps(finite, allow_nan=False).encode() + b"\n"

    def write(self, name: str, content: str | bytes) -> None:
        """Writes a file of the record."""
        if self.folder:
            write_atomically(self.folder / name, content)

    def _write_config(self, finished: bool) -> None:
        self.write(CONFIG, json.dumps({**self._config, "finished": finished}, indent=2) + "\n")

    def add(self, rows: Sequence[Row]) -> None:
        """Appends rows."""
        self.rows += rows
        if self.folder:
            with (self.folder / METRICS).open("ab") as metrics:
                metrics.write(b"".join(map(self._line, rows)))

    def finish(self) -> None:
        """Compresses the rows and marks the record as finished."""
        if self.folder:
            rows = (self.folder / METRICS).read_bytes()
            self.write(f"{METRICS}.gz", gzip.compress(rows, mtime=0))
            (self.folder / METRICS).unlink()
            self._write_config(finished=True)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self.folder and isinstance(error, KeyboardInterrupt):
            raise Interrupted(f"{self.folder} is a partial record.") from error


def new_record(config: Any, study: str) -> Record:
    """A record in the new folder `<date>_<config.record or study>` of `config.records`.

    Without one for the name `none`, and in processes of a cluster but the first.
    """
    if config.record == "none" or not is_main_process():
        return Record(None)
    root, name = Path(config.records), f"{datetime.date.today()}_{config.record or study}"
    root.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = root / (name if number == 1 else f"{name}_{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return Record(folder, config, study)


def resumed_record(config: Any, study: str, claims: str) -> tuple[Any, Record]:
    """The config and the record of `config.resume`, which continues where it stopped.

    An option of several values may gain some. It is an error if it is not a record of this study,
    or another option or the claims differ.
    """
    folder = Path(config.resume)
    if read_settings(folder).get("study") != study:
        raise ExperimentError(f"{folder} is not a record of the study `{study}`.")
    recorded = read_config(type(config), folder)
    for field in dataclasses.fields(config):
        value, before = getattr(config, field.name), getattr(recorded, field.name)
        if field.name in OF_THE_MACHINE or value in (field.default, before):
            continue
        if isinstance(value, tuple) and {*before} < {*value}:
            recorded = dataclasses.replace(recorded, **{field.name: value})
        else:
            option = field.name.replace("_", "-")
            message = (
                f"--{option} is {before} in {folder}, got {value}. Omit it or begin a new record."
            )
            raise ExperimentError(message)
    if (folder / CLAIMS).read_text(encoding="utf-8") != claims:
        raise ExperimentError(f"The claims are not those of {folder / CLAIMS}. Begin a new record.")
    config = dataclasses.replace(recorded, resume=config.resume)
    return config, Record(folder if is_main_process() else None, config, study)
