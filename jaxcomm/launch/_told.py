"""What each process is told of its cluster, in variables of its environment."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxcomm.launch._address import Address, parse_address
from jaxcomm.launch._errors import LaunchError, shown

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
PROCESSES = "JAX_NUM_PROCESSES"
PROCESS = "JAX_PROCESS_ID"
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"
TOKEN = "JAXCOMM_TOKEN"
START_TIMEOUT = "JAXCOMM_START_TIMEOUT"

DEVICE_COUNT = "--xla_force_host_platform_device_count"
THREADS = "NPROC"
LEAST_THREADS = 16

MOST_PROCESSES = 2**16
MOST_SECONDS = 7 * 24 * 3600.0
DEFAULT_SECONDS = 300.0


class Cluster(NamedTuple):
    """All processes, and this one's place among them."""

    coordinator: Address
    processes: int
    process: int
    local_devices: list[int] | None  # of a GPU host; None for all


def whole_number(text: str, least: int, most: int) -> int | None:
    """The number that is written there, if it is one within the limits."""
    if not text.isdecimal() or len(text) > 20:
        return None
    return int(text) if least <= int(text) <= most else None


def seconds_of(text: str) -> float | None:
    """The seconds that are written there, if they are above 0 and at most a week."""
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
    """The devices of this host that are this process's; None for all.

    Raises:
      LaunchError: If they are not numbers with commas.
    """
    if not (text := environment.get(LOCAL_DEVICES)):
        return None
    devices = [whole_number(device, 0, MOST_PROCESSES) for device in text.split(",")]
    if None in devices:
        raise LaunchError(f"{LOCAL_DEVICES} must be numbers with commas, got {shown(text)}.")
    return [device for device in devices if device is not None]


def told(environment: Mapping[str, str]) -> Cluster | None:
    """The cluster that the environment names; None where it says nothing of processes.

    Raises:
      LaunchError: If it says a part, or what cannot be.
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


def start_seconds(environment: Mapping[str, str], given: float | None) -> float:
    """Seconds until all processes have to be there: as given, as told, or 300.

    Raises:
      LaunchError: If they are not above 0 and at most a week.
    """
    name, text = "`timeout`", str(given)
    if given is None:
        name, text = START_TIMEOUT, environment.get(START_TIMEOUT, str(DEFAULT_SECONDS))
    if (seconds := seconds_of(text)) is None:
        raise LaunchError(
            f"{name} must be seconds above 0 and at most {MOST_SECONDS:.0f}, a week, got "
            f"{shown(text)}."
        )
    return seconds


def environment_of(
    cluster: Cluster, seconds: float, token: str, given: Mapping[str, str]
) -> dict[str, str]:
    """What one process of a launcher has to know, beside what is given."""
    devices = cluster.local_devices or []
    threads = str(max(LEAST_THREADS, 2 * len(devices)))
    return {
        THREADS: threads,  # XLA sizes its thread pool by it, and many devices deadlock in a small.
        **given,
        COORDINATOR: str(cluster.coordinator),
        BIND: str(cluster.coordinator),
        PROCESSES: str(cluster.processes),
        PROCESS: str(cluster.process),
        LOCAL_DEVICES: ",".join(map(str, devices)),
        TOKEN: token,
        START_TIMEOUT: f"{seconds:g}",
        "XLA_FLAGS": f"{given.get('XLA_FLAGS', '')} {DEVICE_COUNT}={len(devices)}".strip(),
    }
