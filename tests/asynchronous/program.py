"""A program that trains asynchronously, for tests that send it signals, and its processes."""

import contextlib
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
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


@contextlib.contextmanager
def connected(**options: Any) -> Iterator[None]:
    """A cluster on this machine, to which this program is connected."""
    import ray

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork")
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        ray.init(address="local", **{**quiet, **options})
    try:
        yield
    finally:
        ray.shutdown()


def train_in_a_full_store() -> None:
    """Trains parameters that are too large for the object store of the cluster."""
    full = {"local_fs_capacity_threshold": 0.01}  # The disk counts as full, too.
    with connected(num_cpus=3, object_store_memory=100_000_000, _system_config=full):
        asynchronous.train(
            lambda params, batch: jnp.vdot(params["w"], params["w"]),
            {"w": np.zeros(12_000_000, np.float32)},
            simulated.batches,
            **options_of(events.parameter_server(optax.sgd(0.02))),
        )


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A background shell ignores it.
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
