"""Are all processes of a cluster there, and of one mind, before JAX connects them?

JAX aborts the process, or crashes, where its coordinator's port is taken, cannot be reached, or
where a process is missing. So process 0 first calls the roll on that port: every other process
tells its number and how many it was told of, and hears "complete" or what is wrong. Both sign what
they say with a token that all were given, so that nobody else is taken for one of them.
"""

import contextlib
import hmac
import selectors
import socket
import time

from jaxcomm.launch._address import Address, listen
from jaxcomm.launch._errors import LaunchError
from jaxcomm.launch._told import MOST_PROCESSES, TOKEN, whole_number

GREETING = "jaxcomm-roll-call"
COMPLETE = "complete"
RETRY_SECONDS = 0.2
MOST_BYTES = 1000
# How long process 0 waits for the words of one that has connected: a stranger may say nothing.
PATIENCE_SECONDS = 2.0
# Of how many at once; the one that has been silent longest makes room for the next.
MOST_SILENT = 64
# How much longer than process 0 the others wait, since its verdict says more than theirs.
MARGIN_SECONDS = 3.0
MOST_NAMED = 8


def _sign(token: str, *words: object) -> str:
    return hmac.digest(token.encode(), " ".join(map(str, words)).encode(), "sha256").hex()


def _until(deadline: float, least: float = 0.0) -> float:
    return max(deadline - time.monotonic(), least)


def _numbers(numbers: list[int]) -> str:
    """`"process 1 has"`, `"processes 1, 2 and 3 have"`; of many, the first and how many more."""
    if len(numbers) == 1:
        return f"process {numbers[0]} has"
    named, more = numbers[:MOST_NAMED], len(numbers) - MOST_NAMED
    *most, last = [*map(str, named), f"{more} more"] if more > 0 else map(str, named)
    return f"processes {', '.join(most)} and {last} have"


class _Caller:
    """One that has connected to process 0."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.deadline = time.monotonic() + PATIENCE_SECONDS
        self._received = b""

    def hear(self) -> bytes | None:
        """What it has said, once that is a line or it has closed or says too much; else None."""
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
        """Whether it hears no more; who waits for the verdict has nothing more to say."""
        try:
            self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def tell(self, words: str) -> None:
        """Says one line, which fits in what the system buffers, and parts."""
        with self.connection, contextlib.suppress(OSError):
            self.connection.sendall(f"{words}\n".encode())


class _Roll:
    """Who is there, as process 0 knows it."""

    def __init__(self, server: socket.socket, processes: int, token: str) -> None:
        server.setblocking(False)
        self._server = server
        self._processes = processes
        self._token = token
        self._refused = False  # Whether one has called with another token.
        self._silent: list[_Caller] = []  # Who has yet to greet, the oldest first.
        self._present: dict[int, _Caller] = {}
        self._others: list[_Caller] = []  # Who has greeted, and made the roll fail.
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def _drop(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        caller.connection.close()
        if caller in self._silent:
            self._silent.remove(caller)
        else:
            self._present = {n: c for n, c in self._present.items() if c is not caller}

    def _greeted(self, said: bytes) -> tuple[int, int] | None:
        """Its number, and how many it was told of; None of a stranger."""
        greeting, *words = said.decode(errors="replace").split()[:5] or [""]
        if greeting != GREETING or len(words) != 3:
            return None
        *told, signature = words
        if not hmac.compare_digest(signature.encode(), _sign(self._token, *told).encode()):
            self._refused = True
            return None
        process, processes = (whole_number(word, 1, MOST_PROCESSES) for word in told)
        return (process, processes) if process and processes else None

    def _admit(self, caller: _Caller, said: bytes) -> str | None:
        """Takes in a caller that has said its line; what is wrong, if something is."""
        greeted = self._greeted(said)
        if greeted is None:
            self._drop(caller)
            return None
        self._silent.remove(caller)
        process, told = greeted
        before = self._present.get(process)
        if before is not None and before.has_closed():
            self._drop(before)  # It has died, and has come back.
            before = None
        if told == self._processes and before is None:
            self._present[process] = caller
            return None
        self._others.append(caller)
        if told != self._processes:
            return (
                f"process {process} was told of {told} processes and process 0 of "
                f"{self._processes}; start all with the same number."
            )
        return f"two processes were told that they are process {process}; number them apart."

    def _missing(self, timeout: float) -> str:
        numbers = sorted(set(range(1, self._processes)) - self._present.keys())
        refused = f" One that called with another {TOKEN} was refused." if self._refused else ""
        return (
            f"{_numbers(numbers)} not started within {timeout:g} s, of {self._processes} in all."
            f"{refused}"
        )

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except BlockingIOError:
            return
        except OSError:  # Too many open files, or it has gone again.
            time.sleep(RETRY_SECONDS)
            return
        if len(self._silent) >= MOST_SILENT:
            self._drop(self._silent[0])
        self._silent.append(_Caller(connection))
        self._selector.register(connection, selectors.EVENT_READ, self._silent[-1])

    def _look(self, seconds: float) -> str | None:
        """Waits for something to happen and attends to it; what is wrong, if something is."""
        callers = [key.data for key, _ in self._selector.select(seconds)]
        for caller in [c for c in callers if c in self._present.values()]:
            self._drop(caller)  # It has ended, and its number is free for one that comes back.
        for caller in [c for c in callers if c in self._silent]:
            said = caller.hear()
            if said is not None and (wrong := self._admit(caller, said)):
                return wrong
        if None in callers:
            self._accept()
        return None

    def hold(self, timeout: float) -> str:
        """The verdict, once all are there or it is clear that they will not be."""
        deadline = time.monotonic() + timeout
        while len(self._present) < self._processes - 1:
            now = time.monotonic()
            if now >= deadline:
                return self._missing(timeout)
            for caller in [c for c in self._silent if c.deadline <= now]:
                self._drop(caller)
            next_deadline = min([deadline, *(c.deadline for c in self._silent)])
            if wrong := self._look(next_deadline - now):
                return wrong
        return COMPLETE

    def close(self, words: str) -> None:
        """Says them to all that have greeted, and parts from everybody."""
        self._selector.close()
        for caller in (*self._present.values(), *self._others):
            caller.tell(words)
        for caller in self._silent:
            caller.connection.close()


def call(bind: Address, processes: int, timeout: float, token: str = "") -> None:
    """Process 0's part: waits for the others, and tells them how it ended.

    Raises:
      LaunchError: If it cannot listen, or some are missing, too many, or of another mind.
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
    """One line; what has come of it by then, or where the other has closed or says too much."""
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
    """A connection to process 0, which may not be there yet."""
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
    """The part of the other processes: tells process 0 of this one, and waits for its verdict.

    Raises:
      LaunchError: If the coordinator cannot be reached, or its verdict is not "complete".
    """
    deadline = time.monotonic() + timeout
    said = ""
    with _reach(coordinator, process, deadline, timeout) as connection:
        signature = _sign(token, process, processes)
        with contextlib.suppress(OSError):
            connection.sendall(f"{GREETING} {process} {processes} {signature}\n".encode())
            said = _receive(connection, deadline + MARGIN_SECONDS)
    greeting, signature, verdict = [*said.split(" ", 2), "", "", ""][:3]
    if greeting != GREETING or not hmac.compare_digest(
        signature.encode(), _sign(token, verdict).encode()
    ):
        raise LaunchError(
            f"process {process} got no answer of process 0 at {coordinator} within {timeout:g} s: "
            f"another program listens there, process 0 has ended, or it has another {TOKEN}."
        )
    if verdict != COMPLETE:
        raise LaunchError(verdict)
