"""A program that trains asynchronously, for tests that send it signals, and its processes."""

import contextlib
import sys
import time
from typing import Any

import numpy as np
import optax
import psutil

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


def processes(name: str, pid: int | None = None) -> list[int]:
    """The actors with this name below a process, by default this one."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            is_there = child.status() != psutil.STATUS_ZOMBIE
            if is_there and " ".join(child.cmdline()).startswith(f"ray::{name}"):
                found.append(child.pid)
    return sorted(found)


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
