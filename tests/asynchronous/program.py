"""A program that trains asynchronously, for tests that send it signals, and its processes."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import optax

from jaxcomm import asynchronous
from jaxcomm.synchronization import events
from tests.asynchronous import simulated


def paced(numbers: np.ndarray, worker: int) -> Any:
    time.sleep(0.05)
    return simulated.batches(numbers, worker)


def options_of(policy: events.Policy, **changes: Any) -> dict[str, Any]:
    """The arguments of `train` after the first three."""
    return {
        "policy": policy,
        "workers": 3,
        "examples": simulated.EXAMPLES,
        "batch_size": simulated.BATCH,
        "devices": 1,
        "total": 60 * simulated.BATCH,
        "progress": False,
        **changes,
    }


def descendants(pid: int) -> dict[int, str]:
    """The names of the processes below one that still run."""
    parents, names = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (path / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            name = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if state != "Z":
            parents[int(path.name)], names[int(path.name)] = int(parent), name
    found: set[int] = set()
    new = {pid}
    while new := {child for child, parent in parents.items() if parent in new} - found:
        found |= new
    return {child: names[child] for child in found}


def processes(name: str, pid: int | None = None) -> list[int]:
    """The actors with this name below a process."""
    lines = descendants(os.getpid() if pid is None else pid).items()
    return sorted(child for child, line in lines if line.startswith(f"ray::{name}"))


if __name__ == "__main__":
    result = asynchronous.train(
        simulated.loss,
        simulated.START,
        paced,
        **options_of(
            events.parameter_server(optax.sgd(0.02)),
            total=None,
            seconds=120.0,
            directory=sys.argv[1],
            progress=True,
            on_row=lambda row: print("row", row.kind, flush=True),
        ),
    )
