"""Several processes on one machine."""

import dataclasses

from experiments.configs.option import (
    host_name,
    option,
    port_number,
    positive_integer,
    positive_number,
    rest,
)


@dataclasses.dataclass(frozen=True)
class Launch:
    """How does `train` fare as several processes, which really send what they say?

    Starts processes of `python -m experiments train`, or `pace`, on this machine, joined by
    `jax.distributed` over the loopback interface, and ends with them: all are stopped when one
    fails, on Ctrl+C and on SIGTERM. The exit code is that of the first that failed.

    Command: `python -m experiments launch --processes 4 -- train --method global_qsgd`.

    Expected time: that of `train`, and five seconds a process to start on two CPU cores.
    """

    processes: int = option(2, "how many to start", positive_integer)
    devices_per_process: int = option(
        1, "fake devices of each on the CPU; GPUs of each elsewhere", positive_integer
    )
    port: int = option(0, "of the coordinator; 0 for any that is free", port_number)
    coordinator_address: str = option(
        "127.0.0.1", "address of this machine that the coordinator listens at", host_name
    )
    start_timeout: float = option(
        120.0, "seconds until all processes have to be there", positive_number
    )
    command: tuple[str, ...] = rest()
