"""`python -m jaxcomm.launch --processes 4 -- script.py` runs a script in several processes."""

import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from jaxcomm.launch._address import Address, listen
from jaxcomm.launch._environment import (
    HEARTBEAT_TIMEOUT,
    RESTARTS,
    Cluster,
    environment_of,
)
from jaxcomm.launch._errors import LaunchError, shown
from jaxcomm.launch._options import LaunchOptions, parse
from jaxcomm.launch._processes import ProcessGroup
from jaxcomm.launch._restarts import Restarts
from jaxcomm.launch._run_directory import RUN_DIRECTORY, RunDirectory, run_directory
from jaxcomm.launch._start_watch import StartWatch


def find_port(options: LaunchOptions) -> Address:
    """Returns the address at which the coordinator will listen.

    Raises:
      LaunchError: If the port is in use, or the address does not belong to this machine.
    """
    with listen(Address(options.coordinator_address, options.port)) as server:
        return Address(options.coordinator_address, server.getsockname()[1])


def environments_of(
    options: LaunchOptions, base: Mapping[str, str], slots: Sequence[int] | None = None
) -> list[dict[str, str]]:
    """Returns the environment of each process; chooses a free port and a token.

    Process i uses the devices of slot `slots[i]`; by default, of slot i.

    Raises:
      LaunchError: If the port is in use, or the address does not belong to this machine.
    """
    coordinator, token = find_port(options), secrets.token_hex(16)
    used = range(options.processes) if slots is None else slots

    def environment(process: int, slot: int) -> dict[str, str]:
        first = slot * options.devices_per_process
        devices = list(range(first, first + options.devices_per_process))
        cluster = Cluster(coordinator, len(used), process, devices)
        return {
            **environment_of(cluster, options.start_timeout, token, base),
            HEARTBEAT_TIMEOUT: str(options.heartbeat_timeout),
        }

    return [environment(process, slot) for process, slot in enumerate(used)]


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Ends this process in order on a SIGTERM that comes while no processes run."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _supervise(
    options: LaunchOptions, program: str, given: Mapping[str, str], directory: RunDirectory
) -> int:
    """Starts the processes, and starts them again while the plan says so."""
    command = [sys.executable, *options.command]
    plan = Restarts(options, directory)
    while True:
        directory.forget_start()
        own = {RUN_DIRECTORY: str(directory.path)}
        if options.restarts:
            own[RESTARTS] = str(plan.starts)
        environments = [
            {**environment, **own} for environment in environments_of(options, given, plan.slots)
        ]
        group = ProcessGroup(grace=options.grace)
        outcome = group.run(
            command,
            environments,
            lambda outcome: plan.conclude(outcome, program),
            StartWatch(options.start_timeout, environments, directory, plan.watch),
        )
        # A signal may have come after the plan was made.
        signalled = outcome.failed is None and outcome.signal is not None
        if not plan.starts_again or signalled or outcome.interrupted is not None:
            return plan.code_of(outcome)


def start(options: LaunchOptions, program: str, given: Mapping[str, str] = os.environ) -> int:
    """Starts the Python processes, waits for them and returns the exit code of the first failure.

    Ctrl+C and SIGTERM are passed on to the processes. With `--restarts`, processes are started
    again after a failure, and the code is that of the last start. Call this from the main thread,
    which receives signals.

    Args:
      options: The options that :func:`parse` returns.
      program: The program name in error messages.
      given: The base environment of the processes, to which the launcher adds its variables.

    Raises:
      LaunchError: If a process cannot be started.

    Example:
      >>> from jaxcomm import launch
      >>> launch.start(launch.parse(["--", "-c", "raise SystemExit(0)"], "launch"), "launch")
      0
    """
    with _ending_on_sigterm(), run_directory() as directory:
        return _supervise(options, program, given, directory)


def main(arguments: Sequence[str]) -> int:
    """Runs the launcher and returns its exit code."""
    program = "jaxcomm.launch"
    try:
        options = parse(arguments, "python -m jaxcomm.launch")
        script = options.command[0]
        if not script.startswith("-") and not Path(script).exists():
            raise LaunchError(
                f"there is no script {shown(script)}: write a script, or -m and a module, after --."
            )
        return start(options, program)
    except LaunchError as error:
        print(f"{program}: error:", " ".join(str(error).split()), file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
