"""Which cluster this process belongs to, and where its coordinator listens.

Which processes there are is told by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID,
as `python -m jaxcomm.launch` sets them and a user may; where they are not set, JAX finds it out
from Slurm, Open MPI, Kubernetes or the TPU pod.
"""

import ipaddress
import socket
from collections.abc import Mapping

from jaxcomm.launch._address import Address, parse_address
from jaxcomm.launch._errors import LaunchError
from jaxcomm.launch._told import (
    BIND,
    COORDINATOR,
    MOST_PROCESSES,
    PROCESS,
    PROCESSES,
    Cluster,
    local_devices,
    told,
)


def _detected(environment: Mapping[str, str], timeout: float) -> Cluster:
    """What JAX finds out; one private name, since `jax.distributed.initialize` only acts on it."""
    from jax._src.clusters import ClusterEnv

    own = local_devices(environment)
    try:
        coordinator, processes, process, devices = ClusterEnv.auto_detect_unset_distributed_params(
            environment.get(COORDINATOR),
            None,
            None,
            own,
            None,
            max(1, round(timeout)),
        )
    except Exception as error:  # Of a cluster's own client, so of any type.
        raise LaunchError(f"JAX cannot find the cluster: {error}") from error
    if coordinator is None or processes is None or process is None:
        raise LaunchError(
            "there is no cluster to join: run under Slurm, Open MPI, Kubernetes or on a TPU pod, "
            "by `python -m jaxcomm.launch` on one machine, or set "
            f"{COORDINATOR}, {PROCESSES} and {PROCESS}."
        )
    return Cluster(
        parse_address(coordinator), processes, process, None if devices is None else list(devices)
    )


def find_cluster(environment: Mapping[str, str], timeout: float) -> Cluster:
    """The cluster that this process belongs to.

    Raises:
      LaunchError: If there is none, or what is told of it is incomplete or impossible.
    """
    cluster = told(environment) or _detected(environment, timeout)
    if not 1 <= cluster.processes <= MOST_PROCESSES:
        raise LaunchError(
            f"a cluster is of 1 to {MOST_PROCESSES} processes, got {cluster.processes}."
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
    """Where process 0 listens: as told, on loopback for a cluster there, else on all interfaces."""
    if given := environment.get(BIND):
        return parse_address(given)
    if _is_loopback(coordinator.host):
        return coordinator
    return Address("::" if socket.has_dualstack_ipv6() else "0.0.0.0", coordinator.port)
