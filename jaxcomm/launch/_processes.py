"""A group of processes on this machine; when one fails, all are stopped."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from jaxcomm.launch._environment import LostProcessError

GRACE_SECONDS = 5.0
POLL_SECONDS = 0.02
# How long the last lines may take: a child that could not be killed may hold the output open.
DRAIN_SECONDS = 5.0
# And after a signal, when perhaps no program reads them.
STUCK_SECONDS = 2.0
# When a process dies, others may fail before the system reports that it has died.
HOLD_SECONDS = 0.5
# How a process ends after it has lost another: JAX aborts it, or it exits with this code.
CONSEQUENCES = (-signal.SIGABRT, LostProcessError.code)
MOST_LETTERS = 2**16

TIED = str(Path(__file__).with_name("_tied.py"))

_writing = threading.Lock()


class Outcome(NamedTuple):
    """How the processes ended."""

    code: int  # 0, the exit code of the first failure, or 128 + the signal that stopped all
    failed: int | None = None  # the number of the first process that failed
    signal: int | None = None  # the signal that ended this process, or all processes


def _write(descriptor: int, line: str) -> None:
    left = f"{line}\n".encode()
    with _writing:
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:  # Another program has made the file nonblocking.
                select.select([], [descriptor], [])


def _wait_for(threads: Sequence[threading.Thread], signals: list[int]) -> None:
    """Waits for threads that write: as long as a pager pauses, but not for long after a signal."""
    deadline = time.monotonic() + (STUCK_SECONDS if signals else DRAIN_SECONDS)
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        if _writing.locked() and not signals:
            deadline = time.monotonic() + DRAIN_SECONDS
        time.sleep(POLL_SECONDS)


def say(line: str, signals: list[int]) -> None:
    """Writes a line to the standard error, and does not wait for its reader after a signal."""

    def write() -> None:
        with contextlib.suppress(OSError):
            _write(2, line)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    _wait_for([thread], signals)


class _Process:
    """One process and its children, which form a process group of the system."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        signals: list[int],
    ) -> None:
        self.number = number
        self._signals = signals
        self._has_ended = False
        tie = ["-I", "-S", TIED, str(os.getpid())] if sys.platform == "linux" else []
        # A new session, so that Ctrl+C reaches only the launcher, which passes it on once.
        self._popen = subprocess.Popen(
            [sys.executable, *tie, *command],
            env={**environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        assert self._popen.stdout is not None and self._popen.stderr is not None
        self.readers = [
            threading.Thread(target=self._forward, args=(pipe, descriptor), daemon=True)
            for pipe, descriptor in ((self._popen.stdout, 1), (self._popen.stderr, 2))
        ]
        for reader in self.readers:
            reader.start()

    def _forward(self, pipe: IO[str], descriptor: int) -> None:
        with pipe:
            for line in iter(lambda: pipe.readline(MOST_LETTERS), ""):
                try:
                    _write(descriptor, f"[{self.number}] {line.rstrip()}")
                except OSError:  # The reader has closed the output, or the disk is full.
                    if signal.SIGPIPE not in self._signals:
                        self._signals.append(signal.SIGPIPE)

    def code(self) -> int | None:
        """The exit code, or minus the signal; None while it runs. Kills what it leaves behind."""
        if not self._has_ended and self._popen.poll() is not None:
            self._has_ended = True
            self.send(signal.SIGKILL)
        return self._popen.returncode

    def is_suspended(self) -> bool:
        """Whether it was stopped by a signal such as SIGSTOP and has not continued."""
        if self._has_ended or not hasattr(os, "waitid"):  # Python 3.12 lacks it on macOS.
            return False
        # It leaves the status for the next call, and does not take the exit code.
        options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):  # It has ended since it was last asked.
            return os.waitid(os.P_PID, self._popen.pid, options) is not None
        return False

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)

    def kill(self) -> None:
        if self.code() is None:
            self.send(signal.SIGKILL)
            self._popen.wait()
            self.code()


def _failure(processes: Sequence[_Process]) -> Outcome | None:
    """The first failure, if there is one; prefers a process that has not lost another."""
    if not any(process.code() for process in processes):
        return None
    deadline = time.monotonic() + HOLD_SECONDS
    while True:
        codes = {p.number: code for p in processes if (code := p.code())}
        causes = [number for number, code in codes.items() if code not in CONSEQUENCES]
        if causes or time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    suspended = [process.number for process in processes if process.is_suspended()]
    number = [*causes, *suspended, *codes][0]
    # A suspended process has no exit code: the others were lost because it did not answer.
    code = codes.get(number, -signal.SIGSTOP)
    return Outcome(code, number) if code > 0 else Outcome(128 - code, number, -code)


def _stop(processes: Sequence[_Process], number: int, grace: float, signals: list[int]) -> None:
    """Asks all to end; kills them after the grace period, or at another signal."""
    for process in processes:
        if process.code() is None:
            process.send(number)
    known, deadline = len(signals), time.monotonic() + grace
    while any(process.code() is None for process in processes):
        if len(signals) > known or time.monotonic() > deadline:
            return
        time.sleep(POLL_SECONDS)


def run(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    signals: list[int],
    grace: float = GRACE_SECONDS,
) -> Outcome:
    """Runs Python once per environment until all end; stops all when one fails or on a signal.

    Each line of their output gets the number of its process as a prefix.

    Args:
      command: The words after `python`.
      environments: One for each process.
      signals: The signals that this process has received; a handler adds to it. The first is passed
        on to the processes, and another kills them.
      grace: The seconds that processes have to end after a signal.
    """
    processes: list[_Process] = []
    outcome = None
    try:
        for number, environment in enumerate(environments):
            processes.append(_Process(number, command, environment, signals))
        while not signals and any(process.code() is None for process in processes):
            if outcome := _failure(processes):
                break
            time.sleep(POLL_SECONDS)
        outcome = outcome or (None if signals else _failure(processes))
        if outcome:  # Nothing more can be saved: the others wait in collectives.
            _stop(processes, signal.SIGTERM, min(grace, GRACE_SECONDS), signals)
        elif signals:
            outcome = Outcome(128 + signals[0], signal=signals[0])
            passed_on = signal.SIGTERM if signals[0] == signal.SIGPIPE else signals[0]
            _stop(processes, passed_on, grace, signals)
    finally:
        for process in processes:
            process.kill()
    _wait_for([reader for process in processes for reader in process.readers], signals)
    return outcome or Outcome(0)
