"""A file with the number of processes that can run now, and the wait for it to rise."""

import signal
import time
from pathlib import Path

from jaxcomm.launch._environment import MOST_PROCESSES, whole_number
from jaxcomm.launch._errors import LaunchError, shown
from jaxcomm.launch._processes import Outcome
from jaxcomm.launch._run_directory import RunDirectory

READ_SECONDS = 1.0
GROW = "more processes can run"


def read_available(path: Path) -> int:
    """Returns the number in the file.

    Raises:
      LaunchError: If the file cannot be read, or is not one number.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise LaunchError(
            f"--available: {shown(str(path))} cannot be read: {error.strerror}."
        ) from error
    if (number := whole_number(text, 0, MOST_PROCESSES)) is None:
        raise LaunchError(
            f"--available: {shown(str(path))} must be an integer from 0 to {MOST_PROCESSES}, got "
            f"{shown(text)}; replace the file by renaming another."
        )
    return number


class GrowthWatch:
    """Asks to stop at the next checkpoint once more processes can run than at the start."""

    def __init__(
        self, path: Path, at_start: int, running: int, most: int, directory: RunDirectory
    ) -> None:
        """Watches `path`, which said `at_start`; `running` of at most `most` processes run."""
        self._path = path
        self._at_start = at_start
        self._running = running
        self._most = most
        self._directory = directory
        self._next = time.monotonic() + READ_SECONDS
        self._rises = False
        self._version: tuple[int, int] | None = None

    def __call__(self) -> Outcome | None:
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + READ_SECONDS
        try:
            available = read_available(self._path)
        except LaunchError:  # It is being written; the next start reads it again, and complains.
            return None
        # A fall makes a later rise one; a number that stands promises nothing new.
        self._at_start = min(self._at_start, available)
        if available <= self._at_start or min(available, self._most) <= self._running:
            self._rises = False
            return None
        if not self._rises:
            self._rises, self._version = True, self._directory.checkpoint_version()
        if self._directory.checkpoint_version() == self._version:
            return None
        return Outcome(128 + signal.SIGTERM, reason=GROW)
