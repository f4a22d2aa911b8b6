"""A group of processes on this machine; when one fails, all are stopped."""

import collections
import math
import queue
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import NamedTuple

from jaxcomm.launch._errors import LOST_PROCESS, LaunchError
from jaxcomm.launch._guard import Guard
from jaxcomm.launch._output import ROOM_BYTES, Output, read_lines, write_to
from jaxcomm.launch._process import Process

STDOUT, STDERR = write_to(1), write_to(2)

GRACE_SECONDS = 5.0
POLL_SECONDS = 0.05
# How long a process that a worker left behind, and that cannot be killed, may keep its output open.
DRAIN_SECONDS = 5.0
# How long a stopped launcher waits for a reader of its output.
STUCK_SECONDS = 1.0
# How a process ends after it has lost another: JAX aborts it, or it exits with this code.
CONSEQUENCES = (-signal.SIGABRT, LOST_PROCESS)
# When a process dies, others report errors before the system reports that it has died.
HOLD_SECONDS = 0.5
# A line on the standard error that explains why a program ended, in the format of argparse.
EXPLANATION = re.compile(rb"[\w.-]+: (error|interrupted): ")


class Outcome(NamedTuple):
    """How the processes ended."""

    code: int  # 0, the exit code of the first failure, or 128 + the signal that stopped all
    failed: int | None = None  # the number of the first process that failed
    signal: int | None = None  # the signal that ended this process, or all processes
    explained: bool = False  # whether the failed process has printed why
    reason: str | None = None  # why the launcher itself has stopped all
    interrupted: int | None = None  # a signal to the launcher after the first failure


class ProcessGroup:
    """Runs one process per environment; an instance runs once."""

    def __init__(
        self,
        stdout: Callable[[bytes], object] = STDOUT,
        stderr: Callable[[bytes], object] = STDERR,
        grace: float | None = None,
    ) -> None:
        """Forwards the processes' lines to `stdout` and `stderr`, which write bytes.

        Processes that are asked to end are killed after `grace` seconds.
        """
        self._grace = GRACE_SECONDS if grace is None else grace
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._stdout, self._stderr = (
            Output(write, lambda: self._signals.put(signal.SIGPIPE)) for write in (stdout, stderr)
        )
        self._processes: list[Process] = []
        # Guards the attributes below; no thread blocks while it holds the lock.
        self._lock = threading.Lock()
        self._held: collections.deque[tuple[float, Process, bytes]] = collections.deque()
        self._held_bytes = 0
        self._forwarded: int | None = None  # The only process whose lines are still forwarded.
        self._failure_time: float | None = None  # When the first failure was noticed.
        self._outcome: Outcome | None = None

    def run(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        final_message: Callable[[Outcome], str | None] = lambda outcome: None,
        watch: Callable[[], Outcome | None] = lambda: None,
    ) -> Outcome:
        """Runs until all processes have ended; stops all when one fails or on a signal.

        Ctrl+C and SIGTERM are passed on; a second signal kills the processes. Each line gets the
        number of its process as a prefix. Lines of the standard error are delayed by a moment, so
        that once a process has failed, the errors that this causes in others are dropped. The
        result of `final_message` goes to the standard error. `watch` is called often, and stops all
        by returning an outcome.

        Raises:
          LaunchError: If a process cannot be started.
        """

        def enqueue(number: int, frame: FrameType | None) -> None:
            self._signals.put(number)

        handlers = {n: signal.signal(n, enqueue) for n in (signal.SIGINT, signal.SIGTERM)}
        guard = Guard()
        try:
            for number, environment in enumerate(environments):
                self._start(number, command, environment, guard, len(environments))
            while self._outcome is None and any(p.is_running() for p in self._processes):
                self._poll(POLL_SECONDS)
                self._consult(watch)
            self._poll(0)
            if self._outcome is not None:
                stopped = self._outcome.failed is None
                self._end((self._outcome.signal if stopped else None) or signal.SIGTERM)
            self._drain(final_message)
        finally:
            for process in self._processes:
                process.end()
                process.close()
            guard.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        self._poll(0)  # A signal during the last lines.
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
            process = Process(number, command, environment, guard)
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
        self, process: Process, take: Callable[[Process, bytes], Output], source: int
    ) -> None:
        for line in read_lines(source):
            with self._lock:
                output = take(process, line)
            output.wait_for_room()

    def _take(self, process: Process, line: bytes) -> Output:
        self._put(self._stdout, process, line)
        return self._stdout

    def _hold(self, process: Process, line: bytes) -> Output:
        """Delays a line of the standard error until it is known whether to drop it."""
        process.explained |= EXPLANATION.match(line) is not None
        self._held.append((time.monotonic() + HOLD_SECONDS, process, line))
        self._held_bytes += len(line)
        while self._held_bytes > ROOM_BYTES:
            self._release()
        return self._stderr

    def _release(self) -> None:
        _, process, line = self._held.popleft()
        self._held_bytes -= len(line)
        self._put(self._stderr, process, line)

    def _put(self, output: Output, process: Process, line: bytes) -> None:
        if self._forwarded in (None, process.number):
            output.put(b"[%d] %s\n" % (process.number, line))

    def _forward_held(self, until: float) -> None:
        """Forwards delayed lines, unless a failure was noticed whose cause is not yet known."""
        with self._lock:
            undecided = self._failure_time is not None and self._outcome is None
            while not undecided and self._held and self._held[0][0] <= until:
                self._release()

    def _find_failure(self) -> None:
        """Finds the first failure; prefers a process that did not fail because of another."""
        running = [process.is_running() for process in self._processes]
        failed = [process for process in self._processes if process.popen.returncode]
        if self._outcome is not None or not failed:
            return
        if self._failure_time is None:
            self._failure_time = time.monotonic()
        causes = [p for p in failed if p.popen.returncode not in CONSEQUENCES]
        if not causes and any(running) and time.monotonic() < self._failure_time + HOLD_SECONDS:
            return
        suspended = [process for process in self._processes if process.is_suspended()]
        process = (causes or suspended or failed)[0]
        # A suspended process has no exit code: the others were lost because it did not answer.
        code = -signal.SIGSTOP if process in suspended else process.popen.returncode
        ended_by = -code if code < 0 else None
        self._outcome = Outcome(128 - code if code < 0 else code, process.number, ended_by)
        self._forwarded = process.number

    def _poll(self, seconds: float) -> int | None:
        """Waits for a signal, then looks for a failure; returns the signal."""
        try:
            number = self._signals.get(timeout=seconds) if seconds else self._signals.get_nowait()
        except queue.Empty:
            number = None
        with self._lock:
            if number is not None:
                self._interrupt(number)
            self._find_failure()
        self._forward_held(time.monotonic())
        if number is not None:
            self._stdout.stop_blocking()
            self._stderr.stop_blocking()
        return number

    def _interrupt(self, number: int) -> None:
        if self._outcome is None:
            self._outcome = Outcome(128 + number, signal=number)
            self._forwarded = 0
        elif self._outcome.failed is not None or self._outcome.reason is not None:
            self._outcome = self._outcome._replace(interrupted=number)

    def _consult(self, watch: Callable[[], Outcome | None]) -> None:
        if self._outcome is None and (outcome := watch()) is not None:
            with self._lock:
                self._outcome = outcome
                self._forwarded = 0

    def _end(self, number: int) -> None:
        """Stops all processes; kills them after the grace period or at a second signal."""
        number = signal.SIGTERM if number == signal.SIGPIPE else number
        for process in self._processes:
            if process.is_suspended():
                process.end()  # It would not react to another signal.
            elif process.is_running():
                process.send(number)
        # After a failure nothing can be saved: the others wait in collectives.
        failed = self._outcome is not None and self._outcome.failed is not None
        grace = min(self._grace, GRACE_SECONDS) if failed else self._grace
        deadline = time.monotonic() + grace
        while any(process.is_running() for process in self._processes):
            if self._poll(POLL_SECONDS) is not None or time.monotonic() > deadline:
                break
        for process in self._processes:
            process.end()

    def _drain(self, final_message: Callable[[Outcome], str | None]) -> None:
        """Forwards the remaining output; after a signal, does not wait long for a reader."""
        outputs = (self._stdout, self._stderr)
        stopped = self._outcome is not None and self._outcome.failed is None
        finished, quiet_since = False, time.monotonic()
        while True:
            now = time.monotonic()
            waiting = [
                output
                for output in outputs
                if not output.is_empty() and not (stopped and now > output.progress + STUCK_SECONDS)
            ]
            if finished and not waiting:
                return
            reading = any(r.is_alive() for p in self._processes for r in p.readers)
            quiet_since = now if waiting else quiet_since
            if not finished and (not reading or now > quiet_since + DRAIN_SECONDS):
                finished = True
                self._forward_held(math.inf)
                if line := final_message(self._result()):
                    self._stderr.put(f"{line}\n".encode())
            stopped |= self._poll(POLL_SECONDS if reading or waiting else 0) is not None
