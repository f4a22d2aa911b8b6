"""A record of a benchmark: settings, environment and every sample.

config.json      the settings, and whether the run finished
environment.txt  versions, device and command
metrics.jsonl    raw samples, one object per line
"""

import importlib.metadata
import json
import os
import platform
import shlex
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "libtpu", "numpy", "torch")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def describe_environment(arguments: list[str]) -> str:
    """Versions, device and command, one per line."""
    device = jax.devices()[0]
    facts = {
        "command": shlex.join(["python", "-m", "pallas_kernels.bench", *arguments]),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "platform": platform.platform(),
        "CPU count": os.cpu_count(),
        "devices": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
        "runtime": getattr(device.client, "platform_version", "unknown").replace("\n", ", "),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }
    return "".join(f"{name}: {fact}\n" for name, fact in facts.items())


class Record:
    """A folder that is valid at every moment. With `folder` None nothing is written."""

    def __init__(self, folder: Path | None, config: dict[str, Any], arguments: list[str]):
        """Creates the folder.

        Raises:
          OSError: If the folder already exists, or cannot be created.
        """
        self._folder, self._config = folder, config
        if folder is not None:
            folder.mkdir(parents=True)
            self._write_config(finished=False)
            (folder / "environment.txt").write_text(describe_environment(arguments))

    def _write_config(self, finished: bool) -> None:
        if self._folder is not None:
            settings = {**self._config, "finished": finished}
            (self._folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")

    def add(self, row: dict[str, Any]) -> None:
        """Appends one line of metrics."""
        if self._folder is not None:
            with (self._folder / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps(row, allow_nan=False) + "\n")

    def finish(self) -> None:
        """Marks the record as complete."""
        self._write_config(finished=True)
