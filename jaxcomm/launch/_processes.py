"""Processes of this machine that live and die together."""

import collections
import contextlib
import math
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import NamedTuple

from jaxcomm.launch._errors import LOST_PROCESS, LaunchError
from jaxcomm.launch._guard import Guard
from jaxcomm.launch._output import ROOM_BYTES, Output, read_lines, write_to

STDOUT, STDERR = write_to(1), write_to(2)

GRACE_SECONDS = 5.0
POLL_SECONDS = 0.05
# How long what a process has left behind, and cannot be ended, may keep its output open.
DRAIN_SECONDS = 5.0
# How long a stopped launcher waits for somebody to read what it has to write.
STUCK_SECONDS = 1.0
# How a process ends that has lost another: JAX aborts it, or it says so itself.
CONSEQUENCES = (-signal.SIGABRT, LOST_PROCESS)
# Where one process dies, others complain of it at once, before the system tells that it has died.
HOLD_SECONDS = 0.5
# A line of the standard error by which a program explains its end, as argparse's do.
EXPLANATION = re.compile(rb"[\w.-]+: (error|interrupted): ")


class Outcome(NamedTuple):
    """How they ended."""

    code: int  # 0, the exit code of the first that failed, or 128 + the signal that stopped all
    failed: int | None = None  # the number of the first that failed
    signal: int | None = None  # that ended it, or all
    explained: bool = False  # whether it has said why


class _Process:
    """One of them, with all that it starts: a group of processes."""

    def __init__(
        self, number: int, command: Sequence[str], environment: Mapping[str, str], guard: Guard
    ) -> None:
        self.number = number
        self.explained = False
        self._guard = guard
        self._has_ended = False
        # In a session of its own: Ctrl+C in a terminal reaches the launcher alone, which passes
        # it on once.
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
        """Whether it runs; where it does no more, what it has started ends too."""
        if not self._has_ended and self.popen.poll() is not None:
            self._has_ended = True
            self.send(signal.SIGKILL)
            self._guard.forget(self.popen.pid)
        return not self._has_ended

    def end(self) -> None:
        """Kills it and all that it has started."""
        if self.is_running():
            self.send(signal.SIGKILL)
            self.popen.wait()
            self.is_running()

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)

    def close(self) -> None:
        """Closes its pipes, but what a process that it left behind still writes to."""
        if not any(reader.is_alive() for reader in self.readers):
            for pipe in (self.popen.stdout, self.popen.stderr):
                if pipe is not None:
                    pipe.close()


class Together:
    """Runs one process an environment; used once."""

    def __init__(
        self,
        stdout: Callable[[bytes], object] = STDOUT,
        stderr: Callable[[bytes], object] = STDERR,
    ) -> None:
        """Forwards their lines by `stdout` and `stderr`, which write bytes."""
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._stdout, self._stderr = (
            Output(write, lambda: self._signals.put(signal.SIGPIPE)) for write in (stdout, stderr)
        )
        self._processes: list[_Process] = []
        # Guards what follows; nobody waits for anything while holding it.
        self._lock = threading.Lock()
        self._held: collections.deque[tuple[float, _Process, bytes]] = collections.deque()
        self._held_bytes = 0
        self._heard: int | None = None  # The only one whose lines still matter.
        self._noticed: float | None = None  # When one was first seen to have failed.
        self._outcome: Outcome | None = None

    def run(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        last_words: Callable[[Outcome], str | None] = lambda outcome: None,
    ) -> Outcome:
        """Runs until all have ended; where one fails or a signal comes, ends them all.

        Ctrl+C and SIGTERM are passed on, a second one kills. Lines are prefixed by the number of
        their process; those of the standard error come a moment later. Once one has failed, what
        the others say about it is dropped. `last_words` are said on the standard error.

        Raises:
          LaunchError: If one cannot be started.
        """

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.put(number)

        before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
        guard = Guard()
        try:
            for number, environment in enumerate(environments):
                self._start(number, command, environment, guard, len(environments))
            while self._outcome is None and any(p.is_running() for p in self._processes):
                self._look(POLL_SECONDS)
            self._look(0)
            if self._outcome is not None:
                stopped = self._outcome.failed is None
                self._end((self._outcome.signal if stopped else None) or signal.SIGTERM)
            self._drain(last_words)
        finally:
            for process in self._processes:
                process.end()
                process.close()
            guard.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._result()

    def _result(self) -> Outcome:
        outcome = self._outcome or Outcome(0)
        explained = outcome.failed is not None and self._processes[outcome.failed].explained
        return outcome._replace(explained=explained)

    def _start(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        guard: Guard,
        processes: int,
    ) -> None:
        try:
            process = _Process(number, command, environment, guard)
        except OSError as error:
            raise LaunchError(
                f"process {number} of {processes} cannot be started: {error.strerror}."
            ) from error
        self._processes.append(process)
        assert process.popen.stdout is not None and process.popen.stderr is not None
        for take, source in (
            (self._take, process.popen.stdout),
            (self._hold, process.popen.stderr),
        ):
            reader = threading.Thread(
                target=self._forward, args=(process, take, source.fileno()), daemon=True
            )
            reader.start()
            process.readers.append(reader)

    def _forward(
        self, process: _Process, take: Callable[[_Process, bytes], Output], source: int
    ) -> None:
        for line in read_lines(source):
            with self._lock:
                output = take(process, line)
            output.wait_for_room()

    def _take(self, process: _Process, line: bytes) -> Output:
        self._pass_on(self._stdout, process, line)
        return self._stdout

    def _hold(self, process: _Process, line: bytes) -> Output:
        """Keeps a line of the standard error, until it is known whether it matters."""
        process.explained |= EXPLANATION.match(line) is not None
        self._held.append((time.monotonic() + HOLD_SECONDS, process, line))
        self._held_bytes += len(line)
        while self._held_bytes > ROOM_BYTES:
            self._release()
        return self._stderr

    def _release(self) -> None:
        _, process, line = self._held.popleft()
        self._held_bytes -= len(line)
        self._pass_on(self._stderr, process, line)

    def _pass_on(self, output: Output, process: _Process, line: bytes) -> None:
        if self._heard in (None, process.number):
            output.put(b"[%d] %s\n" % (process.number, line))

    def _show_held(self, until: float) -> None:
        """Passes on what came on the standard errors, once it is known whether it matters."""
        with self._lock:
            undecided = self._noticed is not None and self._outcome is None
            while not undecided and self._held and self._held[0][0] <= until:
                self._release()

    def _find_failure(self) -> None:
        """Notices the first that has failed; not one that others have brought down, if it can."""
        running = [process.is_running() for process in self._processes]
        failed = [process for process in self._processes if process.popen.returncode]
        if self._outcome is not None or not failed:
            return
        if self._noticed is None:
            self._noticed = time.monotonic()
        first = [p for p in failed if p.popen.returncode not in CONSEQUENCES]
        if not first and any(running) and time.monotonic() < self._noticed + HOLD_SECONDS:
            return
        process = (first or failed)[0]
        code = process.popen.returncode
        ended_by = -code if code < 0 else None
        self._outcome = Outcome(128 - code if code < 0 else code, process.number, ended_by)
        self._heard = process.number

    def _look(self, seconds: float) -> int | None:
        """Waits a moment for a signal, then looks whether one has failed; the signal."""
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
        if number is not None:
            self._stdout.hurry()
            self._stderr.hurry()
        return number

    def _end(self, number: int) -> None:
        """Asks all to end; kills those that have not within the grace, or at a second signal."""
        number = signal.SIGTERM if number == signal.SIGPIPE else number
        for process in self._processes:
            if process.is_running():
                process.send(number)
        deadline = time.monotonic() + GRACE_SECONDS
        while any(process.is_running() for process in self._processes):
            if self._look(POLL_SECONDS) is not None or time.monotonic() > deadline:
                break
        for process in self._processes:
            process.end()

    def _drain(self, last_words: Callable[[Outcome], str | None]) -> None:
        """Passes on what they have left; a signal ends the waiting for somebody who reads it."""
        outputs = (self._stdout, self._stderr)
        stopped = self._outcome is not None and self._outcome.failed is None
        said, quiet_since = False, time.monotonic()
        while True:
            now = time.monotonic()
            waiting = [
                output
                for output in outputs
                if not output.is_empty() and not (stopped and now > output.progress + STUCK_SECONDS)
            ]
            if said and not waiting:
                return
            reading = any(r.is_alive() for p in self._processes for r in p.readers)
            quiet_since = now if waiting else quiet_since
            if not said and (not reading or now > quiet_since + DRAIN_SECONDS):
                said = True
                self._show_held(math.inf)
                if line := last_words(self._result()):
                    self._stderr.put(f"{line}\n".encode())
            stopped |= self._look(POLL_SECONDS if reading or waiting else 0) is not None
