"""A record of a benchmark: settings, environment and every sample.

config.json      the settings, and whether the run finished
environment.txt  commit, versions, device, its clocks and power, and command
metrics.jsonl    raw samples, one object per line
"""

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from pallas_kernels.benchmark import machine

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "libtpu", "numpy", "torch")

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


def describe_environment(device: dict[str, str], arguments: list[str]) -> str:
    """Commit, versions, device and command, one per line."""
    facts = {
        "command": shlex.join(["python", "-m", "pallas_kernels.bench", *arguments]),
        "commit": machine.commit(),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "platform": platform.platform(),
        "CPU count": os.cpu_count(),
        "devices": device["devices"],
        "runtime": device["runtime"],
        **machine.gpu_state(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }
    return "".join(f"{name}: {fact}\n" for name, fact in facts.items())


def append(folder: Path, row: dict[str, Any]) -> None:
    """Appends one line of metrics."""
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(row, allow_nan=False) + "\n")


class Record:
    """A folder that is valid at every moment."""

    def __init__(self, folder: Path, config: dict[str, Any], environment: str):
        """Creates the folder.

        Raises:
          OSError: If the folder already exists, or cannot be created.
        """
        self._folder, self._config = folder, config
        folder.mkdir(parents=True)
        self._write_config(finished=False)
        (folder / "environment.txt").write_text(environment)

    def _write_config(self, finished: bool) -> None:
        settings = {**self._config, "finished": finished}
        (self._folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")

    def add(self, row: dict[str, Any]) -> None:
        """Appends one line of metrics."""
        append(self._folder, row)

    def rows(self) -> list[dict[str, Any]]:
        """The lines of metrics so far; a line that a killed process left unfinished is skipped."""
        path = self._folder / "metrics.jsonl"
        found = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    def finish(self) -> None:
        """Marks the record as complete."""
        self._write_config(finished=True)
