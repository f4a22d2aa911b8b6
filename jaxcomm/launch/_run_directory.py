"""A directory that the launcher shares with its processes, in which process 0 reports progress.

The launcher makes it, private to its user, names it in JAXCOMM_RUN_DIRECTORY, and removes it.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxcomm.launch._environment import PROCESS
from jaxcomm.launch._errors import LaunchError

RUN_DIRECTORY = "JAXCOMM_RUN_DIRECTORY"

JOINED = "joined"  # Process 0 has begun its roll call.
STARTED = "started"  # All processes have answered it.
PREEMPTED = "preempted"  # `is_preempted` has returned True.
CHECKPOINT = "checkpoint"  # One line: the path of the newest complete checkpoint.


class RunDirectory:
    """The launcher's view of the directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def has(self, name: str) -> bool:
        """Whether process 0 has reported this since the last `forget_start`."""
        return (self.path / name).exists()

    def forget_start(self) -> None:
        """Removes what the next start must report again; the checkpoint stays."""
        for name in (JOINED, STARTED, PREEMPTED):
            (self.path / name).unlink(missing_ok=True)

    def checkpoint(self) -> str | None:
        """Returns the path of the newest complete checkpoint, if one was reported."""
        with contextlib.suppress(FileNotFoundError):
            return (self.path / CHECKPOINT).read_text(encoding="utf-8").rstrip("\n") or None
        return None

    def checkpoint_version(self) -> tuple[int, int] | None:
        """Returns a value that differs after each report of a checkpoint."""
        with contextlib.suppress(FileNotFoundError):
            status = (self.path / CHECKPOINT).stat()
            return status.st_ino, status.st_mtime_ns
        return None


@contextlib.contextmanager
def run_directory() -> Iterator[RunDirectory]:
    """Makes a directory with mode 0700 and removes it at the end of the block.

    Raises:
      LaunchError: If no directory can be made.
    """
    try:
        directory = tempfile.TemporaryDirectory(prefix="jaxcomm-", ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchError(
            f"launch cannot make a temporary directory: {error.strerror}; set TMPDIR to a "
            "directory in which it can."
        ) from error
    with directory as path:
        yield RunDirectory(Path(path))


def _reports_to() -> Path | None:
    """Returns the directory in process 0 of a launcher; None elsewhere."""
    path = os.environ.get(RUN_DIRECTORY)
    return Path(path) if path and os.environ.get(PROCESS, "0") == "0" else None


def report(name: str) -> None:
    """Reports progress to the launcher; does nothing except in process 0 of a launcher."""
    if directory := _reports_to():
        with contextlib.suppress(FileNotFoundError):  # The launcher was killed.
            (directory / name).touch()


def report_checkpoint(path: str | os.PathLike[str]) -> None:
    """Reports the newest complete checkpoint; does nothing except in process 0 of a launcher."""
    if directory := _reports_to():
        with contextlib.suppress(FileNotFoundError):  # The launcher was killed.
            written = directory / f".{CHECKPOINT}-{os.getpid()}"
            written.write_text(f"{os.path.abspath(path)}\n", encoding="utf-8")
            written.replace(directory / CHECKPOINT)
