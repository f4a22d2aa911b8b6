"""Starts programs of this folder, alone or as several processes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(devices: int = 1) -> dict[str, str]:
    """Each process has so many devices."""
    kept = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    flags = [*kept, f"--xla_force_host_platform_device_count={devices}"]
    own = {"PYTHONPATH": str(ROOT), "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    return {**os.environ, **own}


def run(
    *arguments: str, devices: int = 1, seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(devices),
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def launch(options: str, module: str, *arguments: object) -> str:
    """Runs a module of this folder in several processes; returns what the launcher has said."""
    program = ["--", "-m", f"tests.checkpoint.{module}", *map(str, arguments)]
    ran = run("-m", "jaxcomm.launch", *options.split(), *program)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stderr
