"""A record that every run continues: settings, environments, and one line per measurement.

config.json      the settings of the last run, the kind of device, and whether nothing is left
environment.txt  of each run: commit, versions, device, its clocks and power, and command
metrics.jsonl    one object per line, which is never changed

| `kind` of a line | what it says |
|---|---|
| session | a run began: its date, commit and device |
| begun | a measurement began; `part` and `key` name it |
| done | it ended, with its `results` and `seconds` |
| failed | it raised, for this `reason` |
| skipped | twice it was begun, and the process ended before it |
| died, cut | the process of a part died; its time was over in the midst of a measurement |
| again | what failed or was skipped before this line is measured again |"""

import collections
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pallas_kernels

QUERY = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "utilization.gpu",
    "persistence_mode",
)


def _output(command: list[str], folder: pathlib.Path | None = None) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        ran = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.strip()


def commit() -> str:
    """The commit of the source, with "+" if files differ from it.

    Where a copy of the source has no git, the variable `JAXCOMM_COMMIT` names it.
    """
    if named := os.environ.get("JAXCOMM_COMMIT"):
        return named
    folder = pathlib.Path(pallas_kernels.__path__[0])
    name = _output(["git", "rev-parse", "HEAD"], folder)
    if not name:
        return "unknown"
    changed = _output(["git", "status", "--porcelain", "--untracked-files=no"], folder)
    return name + ("+" if changed else "")


def gpu_state() -> dict[str, str]:
    """Clocks, driver and power of the first GPU, by the names of `nvidia-smi`; {} without one."""
    said = _output(["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"])
    if not said:
        return {}
    values = (value.strip() for value in said.splitlines()[0].split(","))
    return dict(zip(QUERY, values, strict=False))


PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "libtpu", "numpy", "optax", "torch", "triton")
METRICS, CONFIG = "metrics.jsonl", "config.json"
RESULTS = ("done", "failed", "skipped")

# A TPU belongs to one process at a time, so the parent asks another one for the device.
_ASK = """
import json
import jax
device = jax.devices()[0]
print(json.dumps({
    "platform": "cuda" if device.platform == "gpu" else device.platform,
    "kind": device.device_kind,
    "devices": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
    "runtime": getattr(device.client, "platform_version", "unknown").replace("\\n", ", "),
}))
"""


def ask_for_device() -> dict[str, str]:
    """Platform, kind and runtime of the first device of JAX.

    Raises:
      RuntimeError: If JAX finds no device.
    """
    ran = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=False)
    if ran.returncode:
        lines = ran.stderr.strip().splitlines()
        raise RuntimeError(f"JAX finds no device: {lines[-1] if lines else 'no output'}")
    facts: dict[str, str] = json.loads(ran.stdout.strip().splitlines()[-1])
    return facts


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _environment(session: dict[str, Any], device: dict[str, str], command: list[str]) -> str:
    """Commit, versions, device and command, one per line."""
    facts = {
        "date": session["date"],
        "command": shlex.join(command),
        "commit": session["commit"],
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "platform": platform.platform(),
        "CPU count": os.cpu_count(),
        "devices": device["devices"],
        "runtime": device["runtime"],
        **gpu_state(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }
    return "".join(f"{name}: {fact}\n" for name, fact in facts.items()) + "\n"


class Record:
    """A folder that is valid at every moment. Several processes may append to it in turn."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the last run."""
        found: dict[str, Any] = json.loads((self.folder / CONFIG).read_text())
        return found

    def begin(self, config: dict[str, Any], device: dict[str, str], command: list[str]) -> None:
        """Begins a run: creates the folder, or continues what is there.

        Raises:
          OSError: If the folder cannot be created or written.
          ValueError: If it is no record, or one of another kind of device or of a rehearsal.
        """
        kept = {"device": device["kind"], "rehearse": config["rehearse"]}
        if (self.folder / CONFIG).exists():
            found = self.config
            before = {name: found.get(name) for name in kept}
            if before != kept:
                raise ValueError(f"{self.folder} is of {before}, not of {kept}: name another one")
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise ValueError(f"{self.folder} is no record: name a new folder, or a record")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write({**config, **kept, "finished": False})
        session = {
            "kind": "session",
            "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S}",
            "commit": commit(),
            "device": device["kind"],
        }
        with (self.folder / "environment.txt").open("a") as file:
            file.write(_environment(session, device, command))
        self.add(session)

    def _write(self, config: dict[str, Any]) -> None:
        (self.folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    def finish(self) -> None:
        """States that nothing is left to measure."""
        self._write({**self.config, "finished": True})

    def add(self, line: dict[str, Any]) -> None:
        """Appends one line, after the end of one that a killed process left unfinished."""
        text = json.dumps(line, allow_nan=False) + "\n"
        with (self.folder / METRICS).open("ab+") as metrics:
            if metrics.tell():
                metrics.seek(-1, os.SEEK_END)
                text = text if metrics.read(1) == b"\n" else "\n" + text
            metrics.write(text.encode())
            metrics.flush()
            os.fsync(metrics.fileno())

    def lines(self) -> list[dict[str, Any]]:
        """All whole lines."""
        path, found = self.folder / METRICS, []
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                value = json.loads(line)
            except ValueError:  # Of JSON, or of UTF-8.
                continue
            if isinstance(value, dict):
                found.append(value)
        return found

    def ends(self, part: str) -> tuple[dict[str, dict[str, Any]], collections.Counter[str]]:
        """The lines of what has ended, by key, and how often what has not was begun in vain."""
        ended: dict[str, dict[str, Any]] = {}
        begun: collections.Counter[str] = collections.Counter()
        latest = ""
        for line in self.lines():
            if line["kind"] == "again":
                ended = {key: one for key, one in ended.items() if one["kind"] == "done"}
                begun.clear()
            elif line.get("part") != part:
                continue
            elif line["kind"] == "begun":
                latest = line["key"]
                begun[latest] += 1
            elif line["kind"] == "cut":  # Not the fault of what was being measured.
                begun[latest] -= 1
            elif line["kind"] in RESULTS:
                ended[line["key"]] = line
        return ended, begun

    def results(self, parts: Iterable[str]) -> list[dict[str, Any]]:
        """The results of all that has ended in these parts; what failed is a line of its own."""
        found: list[dict[str, Any]] = []
        for part in parts:
            for line in self.ends(part)[0].values():
                found += line["results"] if line["kind"] == "done" else [line]
        return found
