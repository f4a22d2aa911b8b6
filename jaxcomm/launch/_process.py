"""One process of the launcher, with its children."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

from jaxcomm.launch._guard import Guard


class Process:
    """One process and its children, which form a process group of the system."""

    def __init__(
        self, number: int, command: Sequence[str], environment: Mapping[str, str], guard: Guard
    ) -> None:
        self.number = number
        self.explained = False
        self._guard = guard
        self._has_ended = False
        # A new session, so that Ctrl+C reaches only the launcher, which passes it on once.
        self.popen = subprocess.Popen(
            command,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        guard.watch(self.popen.pid)
        self.readers: list[threading.Thread] = []

    def is_running(self) -> bool:
        """Whether the process runs; kills its children when it has ended."""
        if not self._has_ended and self.popen.poll() is not None:
            self._has_ended = True
            self.send(signal.SIGKILL)
            self._guard.forget(self.popen.pid)
        return not self._has_ended

    def is_suspended(self) -> bool:
        """Whether the process was stopped by a signal such as SIGSTOP and has not continued."""
        if self._has_ended or not hasattr(os, "waitid"):  # Python 3.12 lacks it on macOS.
            return False
        with contextlib.suppress(ChildProcessError):
            # It leaves the status for the next call, and does not take the exit code.
            options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.popen.pid, options) is not None
        return False

    def end(self) -> None:
        """Kills the process and its children."""
        if self.is_running():
            self.send(signal.SIGKILL)
            self.popen.wait()
            self.is_running()

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)

    def close(self) -> None:
        """Closes the pipes, unless a child that could not be killed still writes to them."""
        if not any(reader.is_alive() for reader in self.readers):
            for pipe in (self.popen.stdout, self.popen.stderr):
                if pipe is not None:
                    pipe.close()
