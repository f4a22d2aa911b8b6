"""Runs all studies whose records are missing or unfinished."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments import studies
from experiments.cli.choices import select
from experiments.cli.configs import Records
from experiments.cli.errors import INTERRUPTED, Interrupted
from experiments.study.store import read_settings
from experiments.study.study import Study, show_duration

DATE = len("2026-11-23")


def newest(root: Path, name: str) -> Path | None:
    """The record of a study that was begun last, if there is one."""
    of_study = [
        path.parent
        for path in root.glob("*/config.json")
        if read_settings(path.parent).get("study") == name
    ]
    return max(
        of_study, key=lambda path: (path.name[:DATE], len(path.name), path.name), default=None
    )


def command_of(study: Study, config: Records) -> Sequence[str] | None:
    """The arguments of `python -m experiments`; None if the record is new and finished."""
    arguments = [study.name, "--records", config.records]
    if study.processes > 1:
        arguments = ["launch", "--processes", str(study.processes), "--", *arguments]
    record = newest(Path(config.records), study.name)
    if record and not read_settings(record).get("finished"):
        return [*arguments, "--resume", str(record)]
    return None if record and record.name[:DATE] >= config.date else arguments


def run(arguments: Sequence[str], date: str) -> int:
    """Runs a command in a process and returns its exit code.

    Args:
      arguments: Those of `python -m experiments`.
      date: The option `--after` with which the same command continues, also on another day.

    The process is in a session of its own, so that it gets an interrupt once.

    Raises:
      Interrupted: After Ctrl+C, when the process has ended.
    """
    command = [sys.executable, "-m", "experiments", *arguments]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            code = process.wait()
    if code == INTERRUPTED:
        raise Interrupted(f"the same command continues with --after {date}.")
    return code


def main(config: Records) -> int:
    """Runs `python -m experiments records`.

    Returns:
      The exit code: the first of a study that is not 0. Later studies run nevertheless.
    """
    codes = []
    for name in select(config.studies, [*studies.names()], "--studies"):
        command, start = command_of(studies.load(name), config), time.monotonic()
        if command is None:
            print(f"{name}: its record is of {config.date} or later", flush=True)
            continue
        print(f"{name}: python -m experiments {' '.join(command)}", flush=True)
        codes.append(run(command, config.date))
        took = show_duration(time.monotonic() - start)
        print(f"{name}: {took}, exit code {codes[-1]}", flush=True)
    return next((code for code in codes if code), 0)
