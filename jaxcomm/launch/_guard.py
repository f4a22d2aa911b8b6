"""Ends groups of processes when the launcher has ended without doing so, as where it is killed.

Run as a program of its own, which needs nothing but the standard library, it reads numbers of
groups, one a line, `-` before those that have ended. The launcher holds the other end of that pipe,
which the system closes with it.
"""

import contextlib
import os
import signal
import subprocess
import sys


class Guard:
    """The program, as the launcher sees it."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl+C is not for it.
        )

    def _say(self, line: str) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(f"{line}\n".encode())

    def watch(self, group: int) -> None:
        """This group is to end with the launcher."""
        self._say(str(group))

    def forget(self, group: int) -> None:
        """This group has ended."""
        self._say(f"-{group}")

    def close(self) -> None:
        """Ends the program, and with it all groups that it has not been told to forget."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.wait()


def main() -> None:
    """Reads until the launcher ends, then kills what is left of its processes."""
    groups: set[int] = set()
    for line in sys.stdin:
        number = int(line)
        groups = groups | {number} if number > 0 else groups - {-number}
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
