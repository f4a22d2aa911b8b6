"""What the machine was doing: commit, clocks, driver and power."""

import os
import pathlib
import shutil
import subprocess

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
