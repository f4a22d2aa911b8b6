"""A private directory of one launch, in which process 0 tells the launcher how far it is.

JAXCOMM_RUN_DIRECTORY is its path. The files in it:

- `joined`: process 0 begins its roll call;
- `started`: the roll call is complete;
- `preempted`: all processes save and end, because one has received SIGTERM;
- `checkpoint`: one line, the absolute path of the newest complete checkpoint.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxcomm.launch._errors import LaunchError

RUN_DIRECTORY = "JAXCOMM_RUN_DIRECTORY"
JOINED, STARTED, PREEMPTED, CHECKPOINT = "joined", "started", "preempted", "checkpoint"


def report(name: str, line: str = "") -> None:
    """Writes a file for the launcher, by rename; without a launcher, does nothing."""
    if directory := os.environ.get(RUN_DIRECTORY):
        part = Path(directory, f"{name}.part")
        part.write_bytes(os.fsencode(line))
        part.replace(Path(directory, name))


def report_checkpoint(path: str | Path) -> None:
    """Tells the launcher the newest checkpoint; without a launcher, does nothing.

    Process 0 calls this once the checkpoint is complete.
    """
    report(CHECKPOINT, f"{Path(path).absolute()}\n")


class RunDirectory:
    """The launcher's side of the directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def forget_start(self) -> None:
        """Removes what concerns one start; the checkpoint stays."""
        for name in (JOINED, STARTED, PREEMPTED):
            (self.path / name).unlink(missing_ok=True)

    def has(self, name: str) -> bool:
        """Whether process 0 has written this file."""
        return (self.path / name).exists()

    def checkpoint(self) -> str | None:
        """Returns the path of the newest checkpoint; None if there is none."""
        try:
            line = os.fsdecode((self.path / CHECKPOINT).read_bytes())
        except FileNotFoundError:
            return None
        return line.rstrip("\n") or None

    def checkpoint_version(self) -> tuple[int, int] | None:
        """Returns what differs between two reports of a checkpoint, even of one path."""
        try:
            status = (self.path / CHECKPOINT).stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns


@contextlib.contextmanager
def run_directory() -> Iterator[RunDirectory]:
    """Makes the directory, which only this user can read, and removes it at the end.

    Raises:
      LaunchError: If it cannot be made.
    """
    try:
        directory = tempfile.TemporaryDirectory(prefix="jaxcomm-", ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchError(
            f"no temporary directory can be made: {error.strerror}; set TMPDIR to another."
        ) from error
    with directory as path:
        yield RunDirectory(Path(path))
