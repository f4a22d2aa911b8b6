"""Joining a cluster of processes, which somebody else has started.

Which processes there are is told by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID,
as `launch` sets them and a user may; where they are not set, JAX finds it out from Slurm, Open MPI,
Kubernetes or the TPU pod.
"""

import contextlib
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn

from experiments.errors import WRONG_INPUT, ExperimentError, LostProcess
from experiments.roll_call import Address, answer, call, parse_address

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
PROCESSES = "JAX_NUM_PROCESSES"
PROCESS = "JAX_PROCESS_ID"
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"

# What JAX gets at least to be imported by all that have answered, and to connect them.
CONNECT_SECONDS = 60.0


class Cluster(NamedTuple):
    """All processes, and this one's place among them."""

    coordinator: Address
    processes: int
    process: int
    local_devices: list[int] | None  # of a GPU host; None for all


def _integer(environment: Mapping[str, str], name: str) -> int:
    if not (text := environment[name]).isdecimal():
        raise ExperimentError(f"{name} must be an integer, got {text!r}.")
    return int(text)


def _local_devices(environment: Mapping[str, str]) -> list[int] | None:
    devices = environment.get(LOCAL_DEVICES)
    if not devices:
        return None
    if not all(device.isdecimal() for device in devices.split(",")):
        raise ExperimentError(f"{LOCAL_DEVICES} must be numbers with commas, got {devices!r}.")
    return [int(device) for device in devices.split(",")]


def _told(environment: Mapping[str, str]) -> Cluster:
    """What the environment says."""
    return Cluster(
        parse_address(environment[COORDINATOR]),
        _integer(environment, PROCESSES),
        _integer(environment, PROCESS),
        _local_devices(environment),
    )


def _detected(environment: Mapping[str, str], timeout: float) -> Cluster:
    """What JAX finds out; one private name, since `jax.distributed.initialize` only acts on it."""
    from jax._src.clusters import ClusterEnv

    try:
        coordinator, processes, process, devices = ClusterEnv.auto_detect_unset_distributed_params(
            environment.get(COORDINATOR),
            None,
            None,
            _local_devices(environment),
            None,
            max(1, round(timeout)),
        )
    except Exception as error:  # Of a cluster's own client, so of any type.
        raise ExperimentError(f"--distributed: {error}") from error
    if coordinator is None or processes is None or process is None:
        raise ExperimentError(
            "--distributed finds no cluster: run under Slurm, Open MPI, Kubernetes or on a TPU "
            f"pod, by `launch` on one machine, or set {COORDINATOR}, {PROCESSES} and {PROCESS}."
        )
    return Cluster(
        parse_address(coordinator), processes, process, None if devices is None else list(devices)
    )


def find_cluster(environment: Mapping[str, str], timeout: float) -> Cluster:
    """The cluster that this process belongs to.

    Raises:
      ExperimentError: If there is none, or what is told of it is incomplete or impossible.
    """
    if PROCESSES in environment or PROCESS in environment:
        names = (COORDINATOR, PROCESSES, PROCESS)
        if missing := [name for name in names if name not in environment]:
            raise ExperimentError(f"--distributed needs {' and '.join(missing)} in the environment")
        cluster = _told(environment)
    else:
        cluster = _detected(environment, timeout)
    if not 0 <= cluster.process < cluster.processes:
        raise ExperimentError(
            f"{cluster.processes} processes are numbered from 0 to {cluster.processes - 1}: there "
            f"is no process {cluster.process}."
        )
    return cluster


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind_address(environment: Mapping[str, str], coordinator: Address) -> Address:
    """Where process 0 listens: as told, on loopback for a cluster there, else on all interfaces."""
    if told := environment.get(BIND):
        return parse_address(told)
    if _is_loopback(coordinator.host):
        return coordinator
    return Address("::" if socket.has_dualstack_ipv6() else "0.0.0.0", coordinator.port)


@contextlib.contextmanager
def _or_give_up(seconds: float, line: str) -> Iterator[None]:
    """Ends this process with one line where the block takes too long; JAX would abort it."""

    def give_up() -> NoReturn:
        print("experiments: error:", line, file=sys.stderr, flush=True)
        os._exit(WRONG_INPUT)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def join(timeout: float) -> None:
    """Makes this process one of its cluster; afterwards `jax.devices()` are those of all.

    What others than the first write to the standard output is lost from then on.

    Args:
      timeout: Seconds until all processes have to be there.

    Raises:
      ExperimentError: If they are not, or there is no such cluster.
    """
    deadline = time.monotonic() + timeout
    cluster = find_cluster(os.environ, timeout)
    bind = bind_address(os.environ, cluster.coordinator)
    if cluster.process == 0:
        call(bind, cluster.processes, timeout)
    else:
        answer(cluster.coordinator, cluster.process, cluster.processes, timeout)
    if cluster.process:
        # The first alone prints, and Gloo would greet from all.
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
    import jax  # Only now, so that what is wrong above is said at once.

    # JAX would take SIGTERM as a notice of preemption, which nothing here asks for.
    jax.config.update("jax_enable_preemption_service", False)
    seconds = max(deadline - time.monotonic(), CONNECT_SECONDS)
    with _or_give_up(
        seconds,
        f"process {cluster.process} of {cluster.processes} has answered the others but could not "
        f"connect with them within {seconds:.0f} s.",
    ):
        try:
            jax.distributed.initialize(
                str(cluster.coordinator),
                cluster.processes,
                cluster.process,
                cluster.local_devices,
                cluster_detection_method="deactivate",
                initialization_timeout=round(seconds) + 60,
                coordinator_bind_address=str(bind),
            )
            jax.devices()
        except RuntimeError as error:
            said = str(error).strip().splitlines()[0]
            raise ExperimentError(
                f"process {cluster.process} of {cluster.processes} cannot connect: {said}"
            ) from error


def has_joined() -> bool:
    """Whether this process is one of a cluster; without importing JAX for it."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def is_first() -> bool:
    """Whether this is the process that prints and records."""
    return not has_joined() or sys.modules["jax"].process_index() == 0


@contextlib.contextmanager
def reporting_lost_processes() -> Iterator[None]:
    """Turns the error of a collective, where another process has ended, into one line.

    Raises:
      LostProcess: For an error of JAX's runtime in a cluster.
    """
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not has_joined():
            raise
        said = str(error).strip().splitlines()[0]
        raise LostProcess(
            f"process {jax.process_index()} cannot go on, most likely since another has ended: "
            f"{said}"
        ) from error
