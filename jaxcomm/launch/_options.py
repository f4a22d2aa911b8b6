"""The options of `python -m jaxcomm.launch`."""

import argparse
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from jaxcomm.launch._address import parse_host
from jaxcomm.launch._environment import MOST_PROCESSES, MOST_SECONDS, seconds_of, whole_number
from jaxcomm.launch._errors import LaunchError, shown
from jaxcomm.launch._processes import GRACE_SECONDS

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
    heartbeat_timeout: int
    grace: float
    restarts: int
    min_processes: int
    available: str | None
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


def _heartbeat(text: str) -> int:
    most = int(MOST_SECONDS)
    if (value := whole_number(text, 1, most)) is None:
        raise argparse.ArgumentTypeError(
            f"must be an integer of at least 1 and at most {most}, a week, got {shown(text)}"
        )
    return value


def _restarts(text: str) -> int:
    if (value := whole_number(text, 0, MOST_PROCESSES)) is None:
        raise argparse.ArgumentTypeError(
            f"must be an integer from 0 to {MOST_PROCESSES}, got {shown(text)}"
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


def _add_failure_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--heartbeat-timeout",
        type=_heartbeat,
        default=20,
        help="seconds after which a process that does not answer counts as lost (default: 20)",
    )
    add(
        "--grace",
        type=_seconds,
        default=GRACE_SECONDS,
        help="seconds that processes get to save and end before they are killed (default: 5)",
    )
    add(
        "--restarts",
        type=_restarts,
        default=0,
        help="how often to start all processes again after one has failed (default: 0)",
    )
    add(
        "--min-processes",
        type=_count,
        help="with --restarts, the least number of processes to go on with (default: --processes)",
    )
    add(
        "--available",
        metavar="FILE",
        help="with --restarts, a file with the number of processes that can run now",
    )


def _check(options: LaunchOptions) -> None:
    if options.min_processes > options.processes:
        raise LaunchError(
            f"--min-processes must be at most --processes, {options.processes}, got "
            f"{options.min_processes}."
        )
    if not options.restarts and (
        options.min_processes < options.processes or options.available is not None
    ):
        raise LaunchError("--min-processes and --available need --restarts of at least 1, got 0.")


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
    _add_failure_options(parser)
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    values = vars(parser.parse_args(words[:end]))
    if end == len(words):
        raise LaunchError("launch needs a command after its options and `--`.")
    if not words[end + 1 :]:
        raise LaunchError("launch needs a command after --, such as: -- script.py --steps 100")
    values["min_processes"] = values["min_processes"] or values["processes"]
    options = LaunchOptions(**values, command=tuple(words[end + 1 :]))
    _check(options)
    return options
