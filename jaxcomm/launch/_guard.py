"""Kills process groups if the launcher ends without stopping them, for instance when it is killed.

This file runs as a separate program that needs only the standard library. It reads numbers of
process groups from a pipe, one per line, with a `-` prefix for groups that have ended. The launcher
holds the other end of the pipe, which the system closes when the launcher ends.
"""

import contextlib
import os
import signal
import subprocess
import sys


class Guard:
    """The launcher's handle of the guard program."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl+C must not reach it.
        )

    def _write(self, line: str) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(f"{line}\n".encode())

    def watch(self, group: int) -> None:
        """Kills this group when the launcher ends."""
        self._write(str(group))

    def forget(self, group: int) -> None:
        """Removes a group that has ended."""
        self._write(f"-{group}")

    def close(self) -> None:
        """Ends the guard, which kills all groups that are still watched."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.wait()


def main() -> None:
    """Reads until the launcher ends, then kills the groups that are still watched."""
    groups: set[int] = set()
    for line in sys.stdin:
        number = int(line)
        groups = groups | {number} if number > 0 else groups - {-number}
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
