"""Checks that all processes of a cluster are present and consistent before JAX connects them.

JAX aborts the process, or crashes, if its coordinator's port is taken or cannot be reached, or if a
process is missing. Process 0 therefore first holds a roll call on that port. Every other process
sends its number and the number of processes that it expects, and receives "complete" or the error.
Both sides sign their messages with a token that all processes have, so that no other program is
mistaken for one of them.
"""

import contextlib
import hmac
import selectors
import socket
import time

from jaxcomm.launch._address import Address, listen
from jaxcomm.launch._environment import MOST_PROCESSES, TOKEN, whole_number
from jaxcomm.launch._errors import LaunchError

GREETING = "jaxcomm-roll-call"
COMPLETE = "complete"
RETRY_SECONDS = 0.2
MOST_BYTES = 1000
# How long process 0 waits for the greeting of a connection: another program may send nothing.
PATIENCE_SECONDS = 2.0
# The most connections without a greeting; a new one replaces the oldest.
MOST_SILENT = 64
# How much longer the others wait than process 0, since its error message says more.
MARGIN_SECONDS = 3.0
MOST_NAMED = 8


def _sign(token: str, *words: object) -> str:
    return hmac.digest(token.encode(), " ".join(map(str, words)).encode(), "sha256").hex()


def _until(deadline: float, least: float = 0.0) -> float:
    return max(deadline - time.monotonic(), least)


def _names(numbers: list[int]) -> str:
    """`"process 1"`, `"processes 1, 2 and 3"`; a long list ends with the number of the others."""
    if len(numbers) == 1:
        return f"process {numbers[0]}"
    named, more = numbers[:MOST_NAMED], len(numbers) - MOST_NAMED
    *most, last = [*map(str, named), f"{more} more"] if more > 0 else map(str, named)
    return f"processes {', '.join(most)} and {last}"


class _Caller:
    """A connection to process 0."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.deadline = time.monotonic() + PATIENCE_SECONDS
        self._received = b""

    def receive(self) -> bytes | None:
        """Returns the message at the end of a line, on close or at the size limit; else None."""
        try:
            more = self.connection.recv(MOST_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            more = b""
        self._received += more
        ended = not more or b"\n" in self._received or len(self._received) >= MOST_BYTES
        return self._received if ended else None

    def has_closed(self) -> bool:
        """Whether the connection is closed, or has sent more after its greeting."""
        try:
            self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def send_and_close(self, line: str) -> None:
        """Sends one line, which fits in the system's buffer, and closes the connection."""
        with self.connection, contextlib.suppress(OSError):
            self.connection.sendall(f"{line}\n".encode())


class _Roll:
    """The roll call of process 0: which processes are present."""

    def __init__(self, server: socket.socket, processes: int, token: str) -> None:
        server.setblocking(False)
        self._server = server
        self._processes = processes
        self._token = token
        self._refused = False  # Whether a greeting had a different token.
        self._silent: list[_Caller] = []  # Without a greeting so far, oldest first.
        self._present: dict[int, _Caller] = {}
        self._others: list[_Caller] = []  # The greeting that made the roll call fail.
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def _drop(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        caller.connection.close()
        if caller in self._silent:
            self._silent.remove(caller)
        else:
            self._present = {n: c for n, c in self._present.items() if c is not caller}

    def _parse(self, message: bytes) -> tuple[int, int] | None:
        """Returns the process's number and the number it expects; None for other programs."""
        greeting, *words = message.decode(errors="replace").split()[:5] or [""]
        if greeting != GREETING or len(words) != 3:
            return None
        *numbers, signature = words
        if not hmac.compare_digest(signature.encode(), _sign(self._token, *numbers).encode()):
            self._refused = True
            return None
        process, expected = (whole_number(word, 1, MOST_PROCESSES) for word in numbers)
        return (process, expected) if process and expected else None

    def _admit(self, caller: _Caller, message: bytes) -> str | None:
        """Registers a caller that has sent its greeting; returns an error, if there is one."""
        greeting = self._parse(message)
        if greeting is None:
            self._drop(caller)
            return None
        self._silent.remove(caller)
        process, expected = greeting
        before = self._present.get(process)
        if before is not None and before.has_closed():
            self._drop(before)  # The process has died and was started again.
            before = None
        if expected == self._processes and before is None:
            self._present[process] = caller
            return None
        self._others.append(caller)
        if expected != self._processes:
            return (
                f"process {process} expects {expected} processes and process 0 expects "
                f"{self._processes}; start all with the same number of processes."
            )
        return f"two processes have the number {process}; give each process a different number."

    def _missing(self, timeout: float) -> str:
        numbers = sorted(set(range(1, self._processes)) - self._present.keys())
        refused = f" A process with a different {TOKEN} was refused." if self._refused else ""
        have = "has" if len(numbers) == 1 else "have"
        return (
            f"{_names(numbers)} of {self._processes} {have} not started within {timeout:g} s."
            f"{refused}"
        )

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except BlockingIOError:
            return
        except OSError:  # Too many open files, or the connection was closed.
            time.sleep(RETRY_SECONDS)
            return
        if len(self._silent) >= MOST_SILENT:
            self._drop(self._silent[0])
        self._silent.append(_Caller(connection))
        self._selector.register(connection, selectors.EVENT_READ, self._silent[-1])

    def _poll(self, seconds: float) -> str | None:
        """Waits for events and handles them; returns an error, if there is one."""
        callers = [key.data for key, _ in self._selector.select(seconds)]
        for caller in [c for c in callers if c in self._present.values()]:
            self._drop(caller)  # It has ended; a restarted process may use its number.
        for caller in [c for c in callers if c in self._silent]:
            message = caller.receive()
            if message is not None and (error := self._admit(caller, message)):
                return error
        if None in callers:
            self._accept()
        return None

    def hold(self, timeout: float) -> str:
        """Returns the verdict once all processes are present or the roll call has failed."""
        deadline = time.monotonic() + timeout
        while len(self._present) < self._processes - 1:
            now = time.monotonic()
            if now >= deadline:
                return self._missing(timeout)
            for caller in [c for c in self._silent if c.deadline <= now]:
                self._drop(caller)
            next_deadline = min([deadline, *(c.deadline for c in self._silent)])
            if error := self._poll(next_deadline - now):
                return error
        return COMPLETE

    def close(self, line: str) -> None:
        """Sends a line to all callers that have greeted, and closes all connections."""
        self._selector.close()
        for caller in (*self._present.values(), *self._others):
            caller.send_and_close(line)
        for caller in self._silent:
            caller.connection.close()


def call(bind: Address, processes: int, timeout: float, token: str = "") -> None:
    """Holds the roll call in process 0: waits for the other processes and sends them the verdict.

    Raises:
      LaunchError: If it cannot listen, or processes are missing, duplicate or inconsistent.
    """
    with listen(bind) as server:
        roll = _Roll(server, processes, token)
        verdict = "process 0 was stopped."
        try:
            verdict = roll.hold(timeout)
        finally:
            roll.close(f"{GREETING} {_sign(token, verdict)} {verdict}")
    if verdict != COMPLETE:
        raise LaunchError(verdict)


def _receive(connection: socket.socket, deadline: float) -> str:
    """Receives one line; returns what has arrived by the deadline, on close or at the limit."""
    received = b""
    while b"\n" not in received and len(received) < MOST_BYTES and _until(deadline):
        connection.settimeout(_until(deadline, 1e-3))
        try:
            more = connection.recv(MOST_BYTES)
        except OSError:
            break
        if not more:
            break
        received += more
    return received.decode(errors="replace").partition("\n")[0]


def _reach(coordinator: Address, process: int, deadline: float, timeout: float) -> socket.socket:
    """Connects to process 0, which may not have started yet."""
    while True:
        try:
            return socket.create_connection(coordinator, timeout=_until(deadline, 1e-3))
        except OSError as error:
            if _until(deadline) <= RETRY_SECONDS:
                raise LaunchError(
                    f"process {process} cannot reach the coordinator, process 0 at {coordinator}, "
                    f"within {timeout:g} s: {error.strerror or error}."
                ) from error
            time.sleep(RETRY_SECONDS)


def answer(
    coordinator: Address, process: int, processes: int, timeout: float, token: str = ""
) -> None:
    """Answers the roll call in another process: greets process 0 and waits for its verdict.

    Raises:
      LaunchError: If the coordinator cannot be reached, or its verdict is not "complete".
    """
    deadline = time.monotonic() + timeout
    line = ""
    with _reach(coordinator, process, deadline, timeout) as connection:
        signature = _sign(token, process, processes)
        with contextlib.suppress(OSError):
            connection.sendall(f"{GREETING} {process} {processes} {signature}\n".encode())
            line = _receive(connection, deadline + MARGIN_SECONDS)
    greeting, signature, verdict = [*line.split(" ", 2), "", "", ""][:3]
    if greeting != GREETING or not hmac.compare_digest(
        signature.encode(), _sign(token, verdict).encode()
    ):
        raise LaunchError(
            f"process {process} got no answer from process 0 at {coordinator} within {timeout:g} "
            f"s: another program listens there, process 0 has ended, or its {TOKEN} differs."
        )
    if verdict != COMPLETE:
        raise LaunchError(verdict)
