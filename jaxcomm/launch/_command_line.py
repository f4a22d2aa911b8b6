"""`python -m jaxcomm.launch --processes 4 -- script.py` runs a script in several processes."""

import argparse
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from jaxcomm.launch._environment import (
    CHECKPOINT,
    HEARTBEAT_TIMEOUT,
    PREEMPTED,
    RESTARTS,
    RUN_DIRECTORY,
    START_TIMEOUT,
    LaunchError,
    environments_of,
)
from jaxcomm.launch._processes import GRACE_SECONDS, Outcome, run, say

DESCRIPTION = """\
Starts several processes of a program on this machine, joined by jax.distributed over the loopback
interface. When one process fails, and on Ctrl+C or SIGTERM, it stops all of them. The exit code is
that of the first process that failed.

COMMAND is passed to Python: a script, or -m and a module, then their arguments. The script joins
the other processes with `jaxcomm.launch.initialize()`.
"""


class LaunchOptions(NamedTuple):
    """The parsed options and the command to start."""

    processes: int
    devices_per_process: int
    start_timeout: float
    heartbeat_timeout: int
    grace: float
    restarts: int
    min_processes: int
    command: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    """A parser that raises one-line errors instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(message)


def _at_least(least: int, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    def number(text: str) -> float:
        if not (value := kind(text)) >= least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text!r}")
        return value

    number.__name__ = kind.__name__  # argparse shows it if the text is no number.
    return number


def _without_dashes(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments, without a last `--` after which nothing follows."""
    return arguments[:-1] if arguments[-1:] == ["--"] else arguments


def _instead_of(option: str, arguments: Sequence[str], program: str) -> str:
    """What is wrong with an option that the launcher does not have, and what to type."""
    if option.startswith(("-m", "-c")):
        place = arguments.index(option)
        typed = [*program.split(), *arguments[:place], "--", *arguments[place:]]
        return f"`--` is missing before {option}; type: {shlex.join(typed)}"
    return (
        f"the launcher has no option {option}; those of a script follow it: "
        f"{program} [OPTIONS] -- SCRIPT [OPTIONS OF THE SCRIPT]"
    )


def parse(arguments: Sequence[str], program: str) -> LaunchOptions:
    """Parses the options and the command after them; before `-m` and `-c` a `--` is necessary.

    Args:
      arguments: The command-line arguments; `--help` prints the help and exits.
      program: The program name in the help.

    Raises:
      LaunchError: If an option is unknown or invalid, or there is no command.

    Example:
      >>> from jaxcomm.launch._command_line import parse
      >>> parse(["--processes", "4", "--", "train.py", "--steps", "9"], "launch").command
      ('train.py', '--steps', '9')
    """
    parser = _Parser(
        prog=program,
        usage="%(prog)s [OPTIONS] -- COMMAND",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    one, seconds = _at_least(1), _at_least(0, float)
    for name, kind, default, text in (
        ("processes", one, 2, "number of processes"),
        ("devices-per-process", one, 1, "GPUs, or simulated CPU devices, of each process"),
        ("start-timeout", seconds, 120.0, "seconds in which all processes must start"),
        ("heartbeat-timeout", one, 20, "seconds until a process that does not answer is lost"),
        ("grace", seconds, GRACE_SECONDS, "seconds to save and end until processes are killed"),
        ("restarts", _at_least(0), 0, "how often to start again after a process has failed"),
        ("min-processes", one, None, "start again without the process that failed, with so many"),
    ):
        shown = "--processes" if default is None else default
        parser.add_argument(
            f"--{name}", type=kind, default=default, help=f"{text} (default: {shown})"
        )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    known, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise LaunchError(_instead_of(unknown[0], arguments, program))
    values = vars(known)
    command = values.pop("command")
    values["command"] = tuple(command[1:] if command[:1] == ["--"] else command)
    if not values["command"]:
        raise LaunchError(
            "a script is missing after the options; type: "
            + shlex.join([*program.split(), *_without_dashes(arguments), "--", "script.py"])
        )
    least = values["min_processes"] or values["processes"]
    options = LaunchOptions(**{**values, "min_processes": least})
    if least > options.processes or (least < options.processes and not options.restarts):
        raise LaunchError(
            "--min-processes must be at most --processes, and needs --restarts of at least 1."
        )
    return options


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # A real-time signal has no name.
        return str(number)


def _cause(outcome: Outcome, processes: int) -> str:
    """Why all processes have ended."""
    if outcome.failed is None:
        return f"{_name_of(outcome.signal or 0)} has stopped all processes"
    process = f"process {outcome.failed} of {processes}"
    if outcome.signal == signal.SIGSTOP:
        return f"{process} was stopped (SIGSTOP) and did not answer"
    if outcome.signal is None:
        return f"{process} has ended with exit code {outcome.code}"
    return f"{process} has ended with signal {_name_of(outcome.signal)}"


def _supervise(
    options: LaunchOptions,
    program: str,
    given: Mapping[str, str],
    directory: Path,
    signals: list[int],
) -> int:
    """Starts the processes, and starts them again after a failure while restarts are left.

    A slot is a place for a process: its number selects the devices.
    """
    slots, restart = [*range(options.processes)], 0
    while True:
        settings = {
            **given,
            START_TIMEOUT: str(options.start_timeout),
            HEARTBEAT_TIMEOUT: str(options.heartbeat_timeout),
            RUN_DIRECTORY: str(directory),
            RESTARTS: str(restart),
        }
        environments = environments_of(slots, options.devices_per_process, settings)
        outcome = run(options.command, environments, signals, options.grace)
        if outcome.code == 0 and (directory / PREEMPTED).exists():
            (directory / PREEMPTED).unlink()
            outcome = Outcome(128 + signal.SIGTERM, signal=signal.SIGTERM)
        if outcome.code == 0:
            return 0
        cause, saved = _cause(outcome, len(slots)), directory / CHECKPOINT
        checkpoint = saved.read_text(encoding="utf-8").rstrip() if saved.exists() else None
        if signals or restart == options.restarts:
            newest = f"; the newest checkpoint is {checkpoint}" if checkpoint else ""
            failed = outcome.failed is not None
            line = f"error: {cause}; the others were stopped" if failed else f"interrupted: {cause}"
            say(f"{program}: {line}{newest}.", signals)
            return outcome.code
        restart += 1
        if outcome.failed is not None and len(slots) > options.min_processes:
            del slots[outcome.failed]
        source = f"from the checkpoint {checkpoint}" if checkpoint else "without a checkpoint"
        say(
            f"{program}: {cause}; {len(slots)} {'start' if len(slots) > 1 else 'starts'} again "
            f"{source} (restart {restart} of {options.restarts}).",
            signals,
        )


def start(options: LaunchOptions, program: str, given: Mapping[str, str] = os.environ) -> int:
    """Starts the Python processes, waits for them and returns the exit code of the first failure.

    Ctrl+C and SIGTERM are passed on to the processes; a second signal kills them. With
    `--restarts`, processes are started again after a failure, and the code is that of the last
    start. Call this from the main thread, which receives signals.

    Args:
      options: The options that :func:`parse` returns.
      program: The program name in error messages.
      given: The base environment of the processes, to which the launcher adds its variables.

    Example:
      >>> from jaxcomm.launch._command_line import parse, start
      >>> start(parse(["--", "-c", "raise SystemExit(0)"], "launch"), "launch")
      0
    """
    signals: list[int] = []
    before = {
        number: signal.signal(number, lambda received, frame: signals.append(received))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        with tempfile.TemporaryDirectory(prefix="jaxcomm-", ignore_cleanup_errors=True) as path:
            return _supervise(options, program, given, Path(path), signals)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str]) -> int:
    """Runs the launcher and returns its exit code."""
    program = "jaxcomm.launch"
    try:
        return start(parse(arguments, "python -m jaxcomm.launch"), program)
    except LaunchError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return error.code
