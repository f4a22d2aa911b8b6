"""Buffered lines for one file; only a separate thread waits for the writes."""

import collections
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterator

CHUNK_BYTES = 2**16
MOST_LINE_BYTES = 2**16
# The largest number of buffered bytes before `wait_for_room` blocks.
ROOM_BYTES = 2**20


def write_to(descriptor: int) -> Callable[[bytes], None]:
    """Returns a function that writes all of its data to a file descriptor."""

    def write(data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:  # Another program has made the file nonblocking.
                select.select([], [descriptor], [])

    return write


def read_lines(descriptor: int) -> Iterator[bytes]:
    """Yields lines without line ends as they arrive; splits long lines."""
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
    """Replaces the write function when there is no reader."""


class Output:
    """A file and a buffer of lines to write to it."""

    def __init__(self, write: Callable[[bytes], object], when_broken: Callable[[], None]) -> None:
        """Writes with `write`; calls `when_broken` once, when a write fails."""
        self._write = write
        self._when_broken = when_broken
        self._lines: collections.deque[bytes] = collections.deque()
        self._bytes = 0
        self._lossy = False
        self._changed = threading.Condition()
        self.progress = time.monotonic()  # The time of the last write.
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, line: bytes) -> None:
        """Adds a line without blocking."""
        with self._changed:
            if self._lossy and self._bytes > ROOM_BYTES:
                return
            if not self._bytes:
                self.progress = time.monotonic()
            self._lines.append(line)
            self._bytes += len(line)
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Blocks until the buffer has room."""
        with self._changed:
            self._changed.wait_for(lambda: self._lossy or self._bytes <= ROOM_BYTES)

    def stop_blocking(self) -> None:
        """From now on, discards lines that do not fit in the buffer instead of blocking."""
        with self._changed:
            self._lossy = True
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
                # The reader has closed the file, or the disk is full: discard all further lines.
                self._write = _discard
                self._when_broken()
            with self._changed:
                self._bytes -= len(line)
                self.progress = time.monotonic()
                self._changed.notify_all()
