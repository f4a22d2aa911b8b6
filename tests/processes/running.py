"""Starts Python programs as users do, on CPUs."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.compiled import UNKEPT

ROOT = Path(__file__).parents[2]
SECONDS = 240


def environment(**changes: str) -> dict[str, str]:
    """That of this process, but with JAX's own number of devices, and no cache of programs."""
    given = {**os.environ, **UNKEPT, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    given.pop("XLA_FLAGS", None)
    return {**given, **changes}


def start(
    *arguments: object, folder: Path = ROOT, inside: Sequence[str] = (), **changes: str
) -> "subprocess.Popen[str]":
    """Starts Python, or a command `inside` of which Python and the arguments are the last."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    command = [*inside, sys.executable, "-u", *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, env=environment(**changes), **pipes)


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """The exit code, and what was written."""
    try:
        stdout, stderr = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    return process.returncode, stdout, stderr


def run(*arguments: object, **changes: Any) -> tuple[int, str, str]:
    return finish(start(*arguments, **changes))


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"
