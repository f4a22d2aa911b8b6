"""Runs `train` or `pace` as several processes of this machine, with `jaxcomm.launch`."""

import os
import shlex
import sys
from collections.abc import Sequence

from experiments.cli.configs import Launch, Train
from experiments.cli.errors import ExperimentError
from experiments.cli.parse import Command, parse
from experiments.studies import command_of

# The command of the user, which differs from the command of the processes.
COMMAND = "EXPERIMENTS_COMMAND"


def check(command: Sequence[str]) -> list[str]:
    """Checks that the arguments are those of `train` or `pace`; returns those of each process.

    Raises:
      ExperimentError: If the arguments are invalid.
    """
    commands = {"train": Command("", lambda: Train), "pace": command_of("pace")}
    _, config = parse(commands, command)
    if getattr(config, "devices", None) is not None:
        raise ExperimentError(
            "--devices cannot be used under `launch`; use its option --devices-per-process."
        )
    return list(command) if config.distributed else [*command, "--distributed"]


def main(config: Launch) -> int:
    """Runs `python -m experiments launch`; returns the exit code of the first failure."""
    from jaxcomm import launch
    from jaxcomm.launch import _command_line

    try:
        options = _command_line.parse(config.arguments, "python -m experiments launch")
        command = ("-m", "experiments", *check(options.command))
        options = options._replace(
            command=(*command, "--start-timeout", str(options.start_timeout))
        )
        typed = shlex.join(["python", "-m", "experiments", *sys.argv[1:]])
        return _command_line.start(options, "experiments", {**os.environ, COMMAND: typed})
    except launch.LaunchError as error:
        raise ExperimentError(str(error)) from error
