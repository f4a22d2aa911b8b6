"""What the launcher watches besides the ends of processes: stopped ones, and starts that hang."""

import os
import signal
import socket
import subprocess
import time

from jaxcomm.launch._address import Address
from jaxcomm.launch._errors import WRONG_INPUT
from jaxcomm.launch._run_directory import RunDirectory

STOPS = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
PROBE_SECONDS = 1.0


def stop_signal(child: int) -> int | None:
    """Returns the signal that has stopped this child, or None if it is not stopped."""
    if hasattr(os, "waitid"):
        try:
            # WNOWAIT: whoever asks again gets the same answer.
            found = os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        return found.si_status if found is not None and found.si_pid == child else None
    shown = subprocess.run(
        ["ps", "-o", "state=", "-p", str(child)], capture_output=True, text=True, check=False
    )
    return signal.SIGSTOP if shown.stdout.startswith("T") else None


def listens(address: Address) -> bool:
    """Whether a program accepts connections there."""
    try:
        with socket.create_connection(address, timeout=PROBE_SECONDS) as connection:
            # Without a listener, a connection of this machine to its own port may succeed.
            return bool(connection.getsockname() != connection.getpeername())
    except OSError:
        return False


class StartWatch:
    """Finds that no roll call has begun within the start timeout."""

    def __init__(
        self, directory: RunDirectory, address: Address, processes: int, seconds: float
    ) -> None:
        self._directory = directory
        self._address = address
        self._processes = processes
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._passed = processes == 1  # A script of one process needs no cluster.

    def has_started(self) -> bool:
        """Whether all processes have joined; any that go on after the start timeout have."""
        return self._passed or self._directory.has_connected()

    def check(self) -> tuple[int, str] | None:
        """Returns an exit code and why, once the timeout has passed without a roll call."""
        if self._passed or time.monotonic() < self._deadline:
            return None
        self._passed = self._directory.has_joined() or listens(self._address)
        if self._passed:
            return None
        return WRONG_INPUT, (
            f"error: process 0 of {self._processes} has not called `jaxcomm.launch.initialize()` "
            f"(nor `jax.distributed.initialize()`) within {self._seconds:g} s: call it at the "
            "start of the script, or raise --start-timeout."
        )
