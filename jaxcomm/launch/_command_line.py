"""`python -m jaxcomm.launch --processes 4 -- script.py`: any script as several processes."""

import argparse
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from jaxcomm.launch._address import Address, listen, parse_host
from jaxcomm.launch._errors import LaunchError, shown
from jaxcomm.launch._processes import Outcome, Together
from jaxcomm.launch._told import (
    MOST_PROCESSES,
    MOST_SECONDS,
    Cluster,
    environment_of,
    seconds_of,
    whole_number,
)

DESCRIPTION = """\
Starts processes of a program on this machine, joined by jax.distributed over the loopback
interface, and ends with them: all are stopped when one fails, on Ctrl+C and on SIGTERM. The exit
code is that of the first that failed.

What follows `--` is what Python is given: a script, or -m and a module, and arguments. A script
joins the others by `jaxcomm.launch.join()`.
"""


class LaunchOptions(NamedTuple):
    """What to start, and how."""

    processes: int
    devices_per_process: int
    port: int
    coordinator_address: str
    start_timeout: float
    command: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(message)


def _count(text: str) -> int:
    if (value := whole_number(text, 1, MOST_PROCESSES)) is None:
        raise argparse.ArgumentTypeError(
            f"must be an integer of at least 1 and at most {MOST_PROCESSES}, got {shown(text)}"
        )
    return value


def _port(text: str) -> int:
    if (value := whole_number(text, 0, 2**16 - 1)) is None:
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to 65535, got {shown(text)}")
    return value


def _host(text: str) -> str:
    if (host := parse_host(text)) is None:
        raise argparse.ArgumentTypeError(f"must be a name or address of a host, got {shown(text)}")
    return host


def _seconds(text: str) -> float:
    if (value := seconds_of(text)) is None:
        raise argparse.ArgumentTypeError(
            f"must be a number above 0 and at most {MOST_SECONDS:.0f}, a week, got {shown(text)}"
        )
    return value


def parse(arguments: Sequence[str], program: str) -> LaunchOptions:
    """The options before `--`, and the command after it.

    Args:
      arguments: What a command line holds; `--help` prints and exits.
      program: By which name the help tells of it.

    Raises:
      LaunchError: If an option is unknown or wrong, or there is no command.

    Example:
      >>> from jaxcomm import launch
      >>> launch.parse(["--processes", "4", "--", "train.py", "--steps", "9"], "launch").command
      ('train.py', '--steps', '9')
    """
    parser = _Parser(
        prog=program,
        usage="%(prog)s [OPTIONS] -- COMMAND",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--processes", type=_count, default=2, help="how many to start (default: 2)")
    add(
        "--devices-per-process",
        type=_count,
        default=1,
        help="fake devices of each on the CPU; GPUs of each elsewhere (default: 1)",
    )
    add("--port", type=_port, default=0, help="of the coordinator (default: any that is free)")
    add(
        "--coordinator-address",
        type=_host,
        default="127.0.0.1",
        help="address of this machine that the coordinator listens at (default: 127.0.0.1)",
    )
    add(
        "--start-timeout",
        type=_seconds,
        default=120.0,
        help="seconds until all processes have to be there (default: 120)",
    )
    own = list(arguments)
    end = own.index("--") if "--" in own else len(own)
    values = vars(parser.parse_args(own[:end]))
    if end == len(own):
        raise LaunchError("launch needs a command after its options and `--`.")
    if not own[end + 1 :]:
        raise LaunchError("launch needs a command after --, such as: -- script.py --steps 100")
    return LaunchOptions(**values, command=tuple(own[end + 1 :]))


def find_port(options: LaunchOptions) -> Address:
    """Where the coordinator will listen.

    Raises:
      LaunchError: If the port is in use, or the address is not of this machine.
    """
    with listen(Address(options.coordinator_address, options.port)) as server:
        return Address(options.coordinator_address, server.getsockname()[1])


def environments_of(options: LaunchOptions, given: Mapping[str, str]) -> list[dict[str, str]]:
    """What each process has to know; a free port and a token are chosen here.

    Raises:
      LaunchError: If the port is in use, or the address is not of this machine.
    """
    coordinator, token = find_port(options), secrets.token_hex(16)

    def environment(process: int) -> dict[str, str]:
        first = process * options.devices_per_process
        devices = list(range(first, first + options.devices_per_process))
        cluster = Cluster(coordinator, options.processes, process, devices)
        return environment_of(cluster, options.start_timeout, token, given)

    return [environment(process) for process in range(options.processes)]


def name_of(number: int) -> str:
    """A signal as a user knows it; real-time signals have numbers alone."""
    try:
        return f"signal {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"


def explain(outcome: Outcome, processes: int) -> str | None:
    """Why it ended, where no process has said it."""
    if outcome.failed is None and outcome.signal is not None:
        name = name_of(outcome.signal).removeprefix("signal ")
        return f"interrupted: {name} has stopped all processes."
    if outcome.failed is None or outcome.explained:
        return None
    how = f"exit code {outcome.code}" if outcome.signal is None else name_of(outcome.signal)
    return (
        f"error: process {outcome.failed} of {processes} has ended with {how}; "
        "the others were stopped."
    )


def start(options: LaunchOptions, program: str, given: Mapping[str, str] = os.environ) -> int:
    """Starts the processes of Python and waits for them; the exit code of the first failure.

    Ctrl+C and SIGTERM are passed on to them; it is of the main thread, as signals are.

    Args:
      options: As :func:`parse` returns them.
      program: By which name errors are told.
      given: The environment of the processes, but for what the launcher tells them.

    Raises:
      LaunchError: If they cannot be started.

    Example:
      >>> from jaxcomm import launch
      >>> launch.start(launch.parse(["--", "-c", "raise SystemExit(0)"], "launch"), "launch")
      0
    """

    def last_words(outcome: Outcome) -> str | None:
        line = explain(outcome, options.processes)
        return line and f"{program}: {line}"

    command = [sys.executable, *options.command]
    return Together().run(command, environments_of(options, given), last_words).code


def main(arguments: Sequence[str]) -> int:
    """Launches as the arguments say; the exit code."""
    program = "jaxcomm.launch"
    try:
        options = parse(arguments, "python -m jaxcomm.launch")
        script = options.command[0]
        if not script.startswith("-") and not Path(script).exists():
            raise LaunchError(
                f"there is no script {shown(script)}: after -- comes a script, or -m and a module."
            )
        return start(options, program)
    except LaunchError as error:
        print(f"{program}: error:", " ".join(str(error).split()), file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
