"""`python -m jaxcomm.launch --processes 4 -- script.py` runs a script in several processes."""

import argparse
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from jaxcomm.launch._address import Address, listen, parse_host
from jaxcomm.launch._environment import (
    MOST_PROCESSES,
    MOST_SECONDS,
    Cluster,
    environment_of,
    seconds_of,
    whole_number,
)
from jaxcomm.launch._errors import LaunchError, shown
from jaxcomm.launch._processes import Outcome, ProcessGroup

DESCRIPTION = """\
Starts several processes of a program on this machine, joined by jax.distributed over the loopback
interface. When one process fails, and on Ctrl+C or SIGTERM, it stops all of them. The exit code is
that of the first process that failed.

The words after `--` are passed to Python: a script, or -m and a module, then their arguments. The
script joins the other processes with `jaxcomm.launch.initialize()`.
"""


class LaunchOptions(NamedTuple):
    """The parsed options and the command to start."""

    processes: int
    devices_per_process: int
    port: int
    coordinator_address: str
    start_timeout: float
    command: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    """A parser that raises one-line errors instead of exiting."""

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
        raise argparse.ArgumentTypeError(
            f"must be the name or address of a host, got {shown(text)}"
        )
    return host


def _seconds(text: str) -> float:
    if (value := seconds_of(text)) is None:
        raise argparse.ArgumentTypeError(
            f"must be a number above 0 and at most {MOST_SECONDS:.0f}, a week, got {shown(text)}"
        )
    return value


def parse(arguments: Sequence[str], program: str) -> LaunchOptions:
    """Parses the options before `--` and the command after it.

    Args:
      arguments: The command-line arguments; `--help` prints the help and exits.
      program: The program name in the help.

    Raises:
      LaunchError: If an option is unknown or invalid, or there is no command.

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
    add("--processes", type=_count, default=2, help="number of processes (default: 2)")
    add(
        "--devices-per-process",
        type=_count,
        default=1,
        help="GPUs, or simulated CPU devices, of each process (default: 1)",
    )
    add("--port", type=_port, default=0, help="port of the coordinator (default: any free port)")
    add(
        "--coordinator-address",
        type=_host,
        default="127.0.0.1",
        help="address of this machine at which the coordinator listens (default: 127.0.0.1)",
    )
    add(
        "--start-timeout",
        type=_seconds,
        default=120.0,
        help="seconds in which all processes must start (default: 120)",
    )
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    values = vars(parser.parse_args(words[:end]))
    if end == len(words):
        raise LaunchError("launch needs a command after its options and `--`.")
    if not words[end + 1 :]:
        raise LaunchError("launch needs a command after --, such as: -- script.py --steps 100")
    return LaunchOptions(**values, command=tuple(words[end + 1 :]))


def find_port(options: LaunchOptions) -> Address:
    """Returns the address at which the coordinator will listen.

    Raises:
      LaunchError: If the port is in use, or the address does not belong to this machine.
    """
    with listen(Address(options.coordinator_address, options.port)) as server:
        return Address(options.coordinator_address, server.getsockname()[1])


def environments_of(options: LaunchOptions, base: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns the environment of each process; chooses a free port and a token.

    Raises:
      LaunchError: If the port is in use, or the address does not belong to this machine.
    """
    coordinator, token = find_port(options), secrets.token_hex(16)

    def environment(process: int) -> dict[str, str]:
        first = process * options.devices_per_process
        devices = list(range(first, first + options.devices_per_process))
        cluster = Cluster(coordinator, options.processes, process, devices)
        return environment_of(cluster, options.start_timeout, token, base)

    return [environment(process) for process in range(options.processes)]


def name_of(number: int) -> str:
    """Returns the name of a signal; real-time signals have only a number."""
    try:
        return f"signal {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"


def explain(outcome: Outcome, processes: int) -> str | None:
    """Returns why the launch ended, or None if a process has explained it."""
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
    """Starts the Python processes, waits for them and returns the exit code of the first failure.

    Ctrl+C and SIGTERM are passed on to the processes. Call this from the main thread, which
    receives signals.

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

    def final_message(outcome: Outcome) -> str | None:
        line = explain(outcome, options.processes)
        return line and f"{program}: {line}"

    command = [sys.executable, *options.command]
    return ProcessGroup().run(command, environments_of(options, given), final_message).code


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
