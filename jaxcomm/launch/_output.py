"""Lines on their way to one file, for which nobody but a thread of its own waits."""

import collections
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator

CHUNK_BYTES = 2**16
MOST_LINE_BYTES = 2**16
# What may wait to be written before those who have more to say have to wait.
ROOM_BYTES = 2**20


def write_to(descriptor: int) -> Callable[[bytes], None]:
    """A function that writes all of what it is given to a file."""

    def write(data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:  # Another program that has it open asked for that.
                select.select([], [descriptor], [])

    return write


def read_lines(descriptor: int) -> Iterator[bytes]:
    """Lines without their ends, as they come; long ones in pieces."""
    rest = b""
    with contextlib.suppress(OSError):
        while more := os.read(descriptor, CHUNK_BYTES):
            lines = (rest + more).splitlines(keepends=True)
            rest = b"" if lines[-1].endswith(b"\n") else lines.pop()
            while len(rest) >= MOST_LINE_BYTES:
                lines.append(rest[:MOST_LINE_BYTES])
                rest = rest[MOST_LINE_BYTES:]
            yield from (line.rstrip() for line in lines)
    if rest:
        yield rest.rstrip()


def _discard(data: bytes) -> None:
    """What is written where nobody reads."""


class Output:
    """A file, and the lines that wait to be written to it."""

    def __init__(self, write: Callable[[bytes], object], when_broken: Callable[[], None]) -> None:
        """Writes by `write`; calls `when_broken` once where nobody will read any more."""
        self._write = write
        self._when_broken = when_broken
        self._lines: collections.deque[bytes] = collections.deque()
        self._bytes = 0
        self._hurried = False
        self._changed = threading.Condition()
        self.progress = time.monotonic()  # When something was last written.
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, line: bytes) -> None:
        """Adds a line; never waits."""
        with self._changed:
            if self._hurried and self._bytes > ROOM_BYTES:
                return
            if not self._bytes:
                self.progress = time.monotonic()
            self._lines.append(line)
            self._bytes += len(line)
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Waits until not too much waits to be written."""
        with self._changed:
            self._changed.wait_for(lambda: self._hurried or self._bytes <= ROOM_BYTES)

    def hurry(self) -> None:
        """From now on nobody waits for room; what has none is lost."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def is_empty(self) -> bool:
        with self._changed:
            return not self._bytes

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
            try:
                self._write(line)
            except OSError:
                # The reader has gone, or the disk is full: what comes now is for nobody.
                self._write = _discard
                self._when_broken()
            with self._changed:
                self._bytes -= len(line)
                self.progress = time.monotonic()
                self._changed.notify_all()
