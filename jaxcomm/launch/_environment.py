"""Environment variables that describe the cluster to each process."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxcomm.launch._address import Address, parse_address
from jaxcomm.launch._errors import LaunchError, shown
from jaxcomm.launch._memory import memory_environment

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
PROCESSES = "JAX_NUM_PROCESSES"
PROCESS = "JAX_PROCESS_ID"
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"
TOKEN = "JAXCOMM_TOKEN"
START_TIMEOUT = "JAXCOMM_START_TIMEOUT"
HEARTBEAT_TIMEOUT = "JAXCOMM_HEARTBEAT_TIMEOUT"
RESTARTS = "JAXCOMM_RESTARTS"

DEVICE_COUNT = "--xla_force_host_platform_device_count"
THREADS = "NPROC"
LEAST_THREADS = 16

MOST_PROCESSES = 2**16
MOST_SECONDS = 7 * 24 * 3600.0
DEFAULT_SECONDS = 300.0
DEFAULT_HEARTBEAT = 100  # That of JAX; the launcher, on one machine, needs less.


class Cluster(NamedTuple):
    """A cluster of processes, and the number of this process in it."""

    coordinator: Address
    processes: int
    process: int
    local_devices: list[int] | None  # on a GPU host; None for all devices


def whole_number(text: str, least: int, most: int) -> int | None:
    """Parses an integer within limits; returns None for any other text."""
    if not text.isdecimal() or len(text) > 20:
        return None
    return int(text) if least <= int(text) <= most else None


def seconds_of(text: str) -> float | None:
    """Parses seconds above 0 and at most a week; returns None for any other text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and 0 < value <= MOST_SECONDS else None


def _number(environment: Mapping[str, str], name: str, least: int) -> int:
    text = environment[name]
    if (value := whole_number(text, least, MOST_PROCESSES)) is None:
        raise LaunchError(
            f"{name} must be an integer from {least} to {MOST_PROCESSES}, got {shown(text)}."
        )
    return value


def local_devices(environment: Mapping[str, str]) -> list[int] | None:
    """Returns the devices of this host that belong to this process; None for all.

    Raises:
      LaunchError: If the variable is not a comma-separated list of numbers.
    """
    if not (text := environment.get(LOCAL_DEVICES)):
        return None
    devices = [whole_number(device, 0, MOST_PROCESSES) for device in text.split(",")]
    if None in devices:
        raise LaunchError(f"{LOCAL_DEVICES} must be comma-separated numbers, got {shown(text)}.")
    return [device for device in devices if device is not None]


def read_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster that the environment defines; None if it defines no processes.

    Raises:
      LaunchError: If the definition is incomplete or invalid.
    """
    if PROCESSES not in environment and PROCESS not in environment:
        return None
    if missing := [n for n in (COORDINATOR, PROCESSES, PROCESS) if n not in environment]:
        raise LaunchError(
            f"a process of a cluster needs {' and '.join(missing)} in the environment."
        )
    return Cluster(
        parse_address(environment[COORDINATOR]),
        _number(environment, PROCESSES, 1),
        _number(environment, PROCESS, 0),
        local_devices(environment),
    )


def start_seconds(environment: Mapping[str, str], timeout: float | None) -> float:
    """Returns the start timeout: `timeout`, or the environment's, or 300 seconds.

    Raises:
      LaunchError: If it is not above 0 and at most a week.
    """
    name, text = "`timeout`", str(timeout)
    if timeout is None:
        name, text = START_TIMEOUT, environment.get(START_TIMEOUT, str(DEFAULT_SECONDS))
    if (seconds := seconds_of(text)) is None:
        raise LaunchError(
            f"{name} must be a number of seconds above 0 and at most {MOST_SECONDS:.0f}, a week, "
            f"got {shown(text)}."
        )
    return seconds


def heartbeat_seconds(environment: Mapping[str, str], timeout: int | None) -> int:
    """Returns the heartbeat timeout: `timeout`, or the environment's, or JAX's 100 seconds.

    Raises:
      LaunchError: If it is not an integer of at least 1 and at most a week.
    """
    name, text = "`heartbeat_timeout`", str(timeout)
    if timeout is None:
        name, text = (
            HEARTBEAT_TIMEOUT,
            environment.get(HEARTBEAT_TIMEOUT, str(DEFAULT_HEARTBEAT)),
        )
    if (seconds := whole_number(text, 1, int(MOST_SECONDS))) is None:
        raise LaunchError(
            f"{name} must be an integer of seconds of at least 1 and at most {MOST_SECONDS:.0f}, "
            f"a week, got {shown(text)}."
        )
    return seconds


def environment_of(
    cluster: Cluster, seconds: float, token: str, base: Mapping[str, str]
) -> dict[str, str]:
    """Returns the environment of one process of the launcher, which extends `base`."""
    devices = cluster.local_devices or []
    threads = str(max(LEAST_THREADS, 2 * len(devices)))
    return {
        THREADS: threads,  # The size of XLA's thread pool; a small pool deadlocks many devices.
        **memory_environment(base),
        **base,
        COORDINATOR: str(cluster.coordinator),
        BIND: str(cluster.coordinator),
        PROCESSES: str(cluster.processes),
        PROCESS: str(cluster.process),
        LOCAL_DEVICES: ",".join(map(str, devices)),
        TOKEN: token,
        START_TIMEOUT: f"{seconds:g}",
        "XLA_FLAGS": f"{base.get('XLA_FLAGS', '')} {DEVICE_COUNT}={len(devices)}".strip(),
    }
