"""Finds the cluster of this process and the address of its coordinator.

JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID define the cluster.
`python -m jaxcomm.launch` sets them, and a user may. If they are not set, JAX detects Slurm, Open
MPI, Kubernetes or the TPU pod.
"""

import ipaddress
import socket
from collections.abc import Mapping

from jaxcomm.launch._address import Address, parse_address
from jaxcomm.launch._environment import (
    BIND,
    COORDINATOR,
    MOST_PROCESSES,
    PROCESS,
    PROCESSES,
    Cluster,
    local_devices,
    read_cluster,
)
from jaxcomm.launch._errors import LaunchError


def _detected(environment: Mapping[str, str], timeout: float) -> Cluster:
    """Returns the cluster that JAX detects.

    This needs a private name of JAX: `jax.distributed.initialize` does not return what it detects.
    """
    from jax._src.clusters import ClusterEnv

    try:
        coordinator, processes, process, devices = ClusterEnv.auto_detect_unset_distributed_params(
            environment.get(COORDINATOR),
            None,
            None,
            local_devices(environment),
            None,
            max(1, round(timeout)),
        )
    except Exception as error:  # The cluster's own client may raise any type.
        raise LaunchError(f"JAX cannot detect the cluster: {error}") from error
    if coordinator is None or processes is None or process is None:
        raise LaunchError(
            "there is no cluster to join: run under Slurm, Open MPI, Kubernetes or on a TPU pod, "
            "with `python -m jaxcomm.launch` on one machine, or set "
            f"{COORDINATOR}, {PROCESSES} and {PROCESS}."
        )
    return Cluster(
        parse_address(coordinator), processes, process, None if devices is None else list(devices)
    )


def find_cluster(environment: Mapping[str, str], timeout: float) -> Cluster:
    """Returns the cluster that this process belongs to.

    Raises:
      LaunchError: If there is none, or its definition is incomplete or invalid.
    """
    cluster = read_cluster(environment) or _detected(environment, timeout)
    if not 1 <= cluster.processes <= MOST_PROCESSES:
        raise LaunchError(
            f"a cluster has 1 to {MOST_PROCESSES} processes, got {cluster.processes}."
        )
    if not 0 <= cluster.process < cluster.processes:
        raise LaunchError(
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
    """Returns where process 0 listens.

    This is the bind address of the environment, or else loopback for a coordinator on loopback, or
    else all interfaces.
    """
    if address := environment.get(BIND):
        return parse_address(address)
    if _is_loopback(coordinator.host):
        return coordinator
    return Address("::" if socket.has_dualstack_ipv6() else "0.0.0.0", coordinator.port)
