"""Processes of this machine that live and die together."""

import collections
import contextlib
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO, NamedTuple, TextIO

from experiments.errors import LOST_PROCESS

# Set for processes that are to end when whoever started them does.
WATCHED = "EXPERIMENTS_WATCHED"
# What the user has typed, where that is another command than theirs.
COMMAND = "EXPERIMENTS_COMMAND"

GRACE_SECONDS = 5.0
POLL_SECONDS = 0.05
DRAIN_SECONDS = 5.0
# How a process ends that has lost another: JAX aborts it, or it says so itself.
CONSEQUENCES = (-signal.SIGABRT, LOST_PROCESS)
# Where one process dies, others complain of it at once, before the system tells that it has died.
HOLD_SECONDS = 0.5
# The first word of a line of ours on the standard error, by which a process explains its end.
EXPLANATION = "experiments: "


def end_with_launcher() -> None:
    """Ends this process when its launcher does, even if that is killed.

    The launcher holds the other end of the standard input, which the system closes with it.
    """
    if os.environ.pop(WATCHED, None) is None:
        return

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Outcome(NamedTuple):
    """How they ended."""

    code: int  # 0, the exit code of the first that failed, or 128 + the signal that stopped all
    failed: int | None = None  # the number of the first that failed
    signal: int | None = None  # that ended it, or all
    explained: bool = False  # whether it has said why


class _Process:
    """One of them, whose lines are forwarded."""

    def __init__(self, number: int, command: Sequence[str], environment: Mapping[str, str]):
        self.number = number
        self.explained = False
        # In a session of its own: Ctrl+C in a terminal reaches the launcher alone, which passes
        # it on once.
        self.popen = subprocess.Popen(
            command,
            env={**environment, WATCHED: "1", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        self.readers: list[threading.Thread] = []

    def is_running(self) -> bool:
        return self.popen.poll() is None

    def close(self) -> None:
        """Closes its pipes, but what a process that it left behind still writes to."""
        if not any(reader.is_alive() for reader in self.readers):
            for pipe in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
                pipe.close()

    def send(self, number: int) -> None:
        if self.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, number)


class Together:
    """Runs one process an environment; used once."""

    def __init__(self, stdout: TextIO = sys.stdout, stderr: TextIO = sys.stderr):
        """Forwards their lines to `stdout` and `stderr`."""
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._processes: list[_Process] = []
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._held: collections.deque[tuple[float, _Process, str]] = collections.deque()
        self._heard: int | None = None  # The only one whose lines still matter.
        self._noticed: float | None = None  # When one was first seen to have failed.
        self._outcome: Outcome | None = None

    def run(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> Outcome:
        """Runs until all have ended; where one fails or a signal comes, ends them all.

        Ctrl+C and SIGTERM are passed on, a second one kills. Lines are prefixed by the number of
        their process; those of the standard error come a moment later. Once one has failed, what
        the others say about it is dropped.
        """

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.put(number)

        before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            for number, environment in enumerate(environments):
                self._start(number, command, environment)
            while self._outcome is None and any(p.is_running() for p in self._processes):
                self._look(POLL_SECONDS)
            self._look(0)
            if self._outcome is not None:
                stopped = self._outcome.failed is None
                self._end((self._outcome.signal if stopped else None) or signal.SIGTERM)
            self._drain()
        finally:
            for process in self._processes:
                process.send(signal.SIGKILL)
            for number, handler in before.items():
                signal.signal(number, handler)
        outcome = self._outcome or Outcome(0)
        explained = outcome.failed is not None and self._processes[outcome.failed].explained
        return outcome._replace(explained=explained)

    def _start(self, number: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        process = _Process(number, command, environment)
        self._processes.append(process)
        for name in ("stdout", "stderr"):
            source = getattr(process.popen, name)
            reader = threading.Thread(
                target=self._forward, args=(process, name, source), daemon=True
            )
            reader.start()
            process.readers.append(reader)

    def _forward(self, process: _Process, name: str, source: IO[str]) -> None:
        """Passes on the lines of one stream, those of the standard error by `_show_held`."""
        for line in source:
            with self._lock:
                if name == "stdout":
                    self._print(process, name, line)
                    continue
                if line.startswith(EXPLANATION):
                    process.explained = True
                self._held.append((time.monotonic() + HOLD_SECONDS, process, line))

    def _print(self, process: _Process, name: str, line: str) -> None:
        if self._heard not in (None, process.number):
            return
        try:
            print(f"[{process.number}] {line.rstrip()}", file=self._streams[name], flush=True)
        except BrokenPipeError:
            self._signals.put(signal.SIGPIPE)

    def _show_held(self, until: float) -> None:
        """Prints what came on the standard errors, once it is known whether it matters."""
        with self._lock:
            undecided = self._noticed is not None and self._outcome is None
            while not undecided and self._held and self._held[0][0] <= until:
                _, process, line = self._held.popleft()
                self._print(process, "stderr", line)

    def _find_failure(self) -> None:
        """Notes the first that has failed; not one that others have brought down, if it can."""
        failed = [process for process in self._processes if process.popen.poll()]
        if self._outcome is not None or not failed:
            return
        if self._noticed is None:
            self._noticed = time.monotonic()
        first = [p for p in failed if p.popen.returncode not in CONSEQUENCES]
        running = any(process.is_running() for process in self._processes)
        if not first and running and time.monotonic() < self._noticed + HOLD_SECONDS:
            return
        process = (first or failed)[0]
        code = process.popen.returncode
        ended_by = -code if code < 0 else None
        self._outcome = Outcome(128 - code if code < 0 else code, process.number, ended_by)
        self._heard = process.number

    def _look(self, seconds: float) -> None:
        """Waits a moment for a signal, then looks whether one has failed."""
        try:
            number = self._signals.get(timeout=seconds) if seconds else self._signals.get_nowait()
        except queue.Empty:
            number = None
        with self._lock:
            if number is not None and self._outcome is None:
                self._outcome = Outcome(128 + number, signal=number)
                self._heard = 0
            self._find_failure()
        self._show_held(time.monotonic())

    def _end(self, number: int) -> None:
        """Asks all to end; kills those that have not within the grace, or at a second signal."""
        number = signal.SIGTERM if number == signal.SIGPIPE else number
        for process in self._processes:
            process.send(number)
        deadline = time.monotonic() + GRACE_SECONDS
        while any(process.is_running() for process in self._processes):
            with contextlib.suppress(queue.Empty):
                self._signals.get(timeout=POLL_SECONDS)
                break
            if time.monotonic() > deadline:
                break
        for process in self._processes:
            process.send(signal.SIGKILL)

    def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_SECONDS
        for process in self._processes:
            process.popen.wait()
            for reader in process.readers:
                reader.join(max(0.0, deadline - time.monotonic()))
            process.close()
        self._show_held(math.inf)
