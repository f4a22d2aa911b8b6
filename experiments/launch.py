"""`train` or `pace` as several processes of this machine."""

import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence

from experiments.cluster import BIND, COORDINATOR, LOCAL_DEVICES, PROCESS, PROCESSES
from experiments.command_line import parse
from experiments.configs import Launch, Pace, Train
from experiments.errors import ExperimentError
from experiments.processes import COMMAND, Outcome, Together
from experiments.roll_call import Address, listen

DEVICE_COUNT = "--xla_force_host_platform_device_count"


def check(command: Sequence[str]) -> list[str]:
    """The arguments of each process, if they are those of `train` or `pace`.

    Raises:
      ExperimentError: If not; before anything is started.
    """
    if not command:
        raise ExperimentError("launch needs a command after --, such as: -- train --steps 100")
    _, config = parse({"train": Train, "pace": Pace}, command)
    if getattr(config, "devices", None) is not None:
        raise ExperimentError(
            "--devices is not for `launch`, where every process has --devices-per-process."
        )
    return list(command) if config.distributed else [*command, "--distributed"]


def find_port(config: Launch) -> Address:
    """Where the coordinator will listen.

    Raises:
      ExperimentError: If the port is in use, or the address is not of this machine.
    """
    with listen(Address(config.coordinator_address, config.port)) as server:
        return Address(config.coordinator_address, server.getsockname()[1])


def environment_of(
    process: int, config: Launch, coordinator: Address, given: Mapping[str, str]
) -> dict[str, str]:
    """What one process has to know."""
    first = process * config.devices_per_process
    local = range(first, first + config.devices_per_process)
    flags = f"{given.get('XLA_FLAGS', '')} {DEVICE_COUNT}={config.devices_per_process}"
    return {
        **given,
        COORDINATOR: str(coordinator),
        BIND: str(coordinator),
        PROCESSES: str(config.processes),
        PROCESS: str(process),
        LOCAL_DEVICES: ",".join(map(str, local)),
        COMMAND: shlex.join(["python", "-m", "experiments", *sys.argv[1:]]),
        "XLA_FLAGS": flags.strip(),
    }


def explain(outcome: Outcome, processes: int) -> str | None:
    """Why it ended, where no process has said it."""
    if outcome.failed is None or outcome.explained:
        return None
    how = f"exit code {outcome.code}"
    if outcome.signal is not None:
        how = f"signal {signal.Signals(outcome.signal).name}"
    return f"process {outcome.failed} of {processes} has ended with {how}; the others were stopped."


def main(config: Launch) -> int:
    """Launches, as `python -m experiments launch` asks; the exit code of the first failure."""
    arguments = check(config.command)
    coordinator = find_port(config)
    environments = [
        environment_of(process, config, coordinator, os.environ)
        for process in range(config.processes)
    ]
    command = [sys.executable, "-m", "experiments", *arguments]
    command += ["--start-timeout", str(config.start_timeout)]
    outcome = Together().run(command, environments)
    if line := explain(outcome, config.processes):
        print("experiments: error:", line, file=sys.stderr)
    elif outcome.failed is None and outcome.signal is not None:
        name = signal.Signals(outcome.signal).name
        print(f"experiments: interrupted: {name} has stopped all processes.", file=sys.stderr)
    return outcome.code
