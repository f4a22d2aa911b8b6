"""What processes learn from their environment, and report to the launcher in its run directory."""

import contextlib
import importlib.metadata
import importlib.util
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
PROCESSES = "JAX_NUM_PROCESSES"
PROCESS = "JAX_PROCESS_ID"
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"
START_TIMEOUT = "JAXCOMM_START_TIMEOUT"
HEARTBEAT_TIMEOUT = "JAXCOMM_HEARTBEAT_TIMEOUT"
RESTARTS = "JAXCOMM_RESTARTS"

LEAST_THREADS = 16

TUNABLES = "GLIBC_TUNABLES"
KEPT = ":".join(
    f"glibc.malloc.{name}"
    for name in ("mmap_max=0", f"trim_threshold={2**62}", "arena_max=1")  # No threshold is larger.
)


class LaunchError(Exception):
    """An option, environment variable or process is wrong or missing. The message is one line."""

    code = 2


class LostProcessError(LaunchError):
    """Another process of the cluster has ended, so this process cannot continue."""

    code = 3


def _runs_on_cpus(environment: Mapping[str, str]) -> bool:
    """Whether JAX would have no other devices."""
    if chosen := environment.get("JAX_PLATFORMS"):
        return chosen == "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return not plugins and not any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))


def memory_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that makes glibc keep freed memory, for processes on CPUs.

    XLA allocates the temporaries of a program in each call. By default, glibc maps blocks of 32 MB
    and more from the kernel and unmaps them when they are freed, so each step faults in every page
    again. That can take half of a step. One arena that is never trimmed reuses the blocks.

    Args:
      environment: The base environment. If it has GLIBC_TUNABLES or a MALLOC_ variable, the result
        is empty: the user has chosen.
    """
    is_chosen = any(name == TUNABLES or name.startswith("MALLOC_") for name in environment)
    return {TUNABLES: KEPT} if _runs_on_cpus(environment) and not is_chosen else {}


def environments_of(
    slots: Sequence[int], devices: int, base: Mapping[str, str]
) -> list[dict[str, str]]:
    """Returns the environment of each process, which extends `base`; chooses a free port.

    Process i has the `devices` devices of slot `slots[i]`.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    shared = {
        # The size of XLA's thread pool; a small pool deadlocks many devices.
        "NPROC": str(max(LEAST_THREADS, 2 * devices)),
        **memory_environment(base),
        **base,
        COORDINATOR: coordinator,
        BIND: coordinator,
        PROCESSES: str(len(slots)),
        "XLA_FLAGS": (
            f"{base.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
        ),
    }
    ids = [",".join(str(slot * devices + device) for device in range(devices)) for slot in slots]
    return [
        {**shared, PROCESS: str(process), LOCAL_DEVICES: own} for process, own in enumerate(ids)
    ]


RUN_DIRECTORY = "JAXCOMM_RUN_DIRECTORY"

PREEMPTED = "preempted"  # `is_preempted` has returned True.
CHECKPOINT = "checkpoint"  # One line: the path of the newest complete checkpoint.


def _report(name: str, text: str) -> None:
    """Writes a file at once; does nothing except in process 0 of a launcher."""
    path = os.environ.get(RUN_DIRECTORY)
    if path and os.environ.get(PROCESS, "0") == "0":
        with contextlib.suppress(FileNotFoundError):  # The launcher was killed.
            written = Path(path, f".{name}-{os.getpid()}")
            written.write_text(text, encoding="utf-8")
            written.replace(Path(path, name))


def report_preempted() -> None:
    """Reports that all processes stop after this step."""
    _report(PREEMPTED, "")


def report_checkpoint(path: str | os.PathLike[str]) -> None:
    """Reports the newest complete checkpoint."""
    _report(CHECKPOINT, f"{os.path.abspath(path)}\n")
