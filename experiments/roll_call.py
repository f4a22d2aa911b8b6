"""Are all processes of a cluster there, and of one mind, before JAX starts?

JAX aborts the process, or crashes, where its coordinator's port is taken, cannot be reached, or
where a process is missing. So process 0 first calls the roll on that port: every other process
tells its number and how many it was told of, and hears "complete" or what is wrong.
"""

import contextlib
import errno
import os
import socket
import time
from typing import NamedTuple

from experiments.errors import ExperimentError

GREETING = "jaxcomm-roll-call"
COMPLETE = "complete"
RETRY_SECONDS = 0.2
MOST_BYTES = 1000
# How long process 0 waits for the words of one that has connected: a stranger may say nothing.
PATIENCE_SECONDS = 2.0
# How much longer than process 0 the others wait, since its verdict says more than theirs.
MARGIN_SECONDS = 3.0


class Address(NamedTuple):
    """Where a coordinator listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """`"10.0.0.1:1234"`, `"host:1234"` or `"[::1]:1234"`.

    Raises:
      ExperimentError: If it is none of these.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ExperimentError(f"{text!r} is no address of a coordinator: write HOST:PORT.")
    return Address(host.removeprefix("[").removesuffix("]"), int(port))


def listen(address: Address) -> socket.socket:
    """A socket that listens there, and there alone.

    Raises:
      ExperimentError: If the port is in use, or the address is not of this machine.
    """
    everywhere = address.host in ("::", "0.0.0.0")
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        dual = everywhere and family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, dualstack_ipv6=dual)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ExperimentError(
                f"the coordinator cannot listen at {address}: the port is in use; choose another."
            ) from error
        # A number below 0 is of the resolver; else Python adds to the system's words.
        what = os.strerror(error.errno) if (error.errno or -1) > 0 else error.strerror
        raise ExperimentError(f"the coordinator cannot listen at {address}: {what}.") from error


def _receive(connection: socket.socket) -> str:
    """One line, without its end; what has come where the other has closed or says too much."""
    received = b""
    while not received.endswith(b"\n") and len(received) < MOST_BYTES:
        if not (more := connection.recv(MOST_BYTES)):
            break
        received += more
    return received.decode(errors="replace").rstrip("\n")


def _until(deadline: float, least: float = 0.0) -> float:
    return max(deadline - time.monotonic(), least)


def _numbers(numbers: list[int]) -> str:
    """`"process 1 has"`, `"processes 1, 2 and 3 have"`."""
    if len(numbers) == 1:
        return f"process {numbers[0]} has"
    *most, last = map(str, numbers)
    return f"processes {', '.join(most)} and {last} have"


def _greeted(connection: socket.socket, seconds: float) -> tuple[int, int] | None:
    """The number of who has connected, and how many it was told of; None of a stranger."""
    connection.settimeout(min(PATIENCE_SECONDS, seconds))
    try:
        greeting, process, processes = _receive(connection).split()
    except (OSError, ValueError):
        return None
    known = greeting == GREETING and process.isdecimal() and processes.isdecimal()
    return (int(process), int(processes)) if known else None


def _call(
    server: socket.socket, processes: int, timeout: float, waiting: list[socket.socket]
) -> str:
    """The verdict, once all are there or it is clear that they will not be.

    Fills in who waits for it.
    """
    deadline = time.monotonic() + timeout
    missing = set(range(1, processes))
    while missing:
        server.settimeout(_until(deadline, 1e-3))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            return (
                f"{_numbers(sorted(missing))} not started within {timeout:g} s, of {processes} "
                "in all."
            )
        waiting.append(connection)
        greeted = _greeted(connection, _until(deadline, 1e-3))
        if greeted is None:
            waiting.pop().close()
            continue
        process, told = greeted
        if told != processes:
            return (
                f"process {process} was told of {told} processes and process 0 of {processes}; "
                "start all with the same number."
            )
        if process not in missing:
            return f"two processes were told that they are process {process}; number them apart."
        missing.remove(process)
    return COMPLETE


def call(bind: Address, processes: int, timeout: float) -> None:
    """Process 0's part: waits for the others, and tells them how it ended.

    Raises:
      ExperimentError: If it cannot listen, or some are missing, too many, or of another mind.
    """
    waiting: list[socket.socket] = []
    with listen(bind) as server:
        verdict = _call(server, processes, timeout, waiting)
    for connection in waiting:
        with connection, contextlib.suppress(OSError):
            connection.sendall(f"{GREETING} {verdict}\n".encode())
    if verdict != COMPLETE:
        raise ExperimentError(verdict)


def answer(coordinator: Address, process: int, processes: int, timeout: float) -> None:
    """The part of the other processes: tells process 0 of this one, and waits for its verdict.

    Raises:
      ExperimentError: If the coordinator cannot be reached, or its verdict is not "complete".
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            connection = socket.create_connection(coordinator, timeout=_until(deadline, 1e-3))
            break
        except OSError as error:
            if _until(deadline) <= RETRY_SECONDS:
                raise ExperimentError(
                    f"process {process} cannot reach the coordinator, process 0 at {coordinator}, "
                    f"within {timeout:g} s: {error.strerror or error}."
                ) from error
            time.sleep(RETRY_SECONDS)
    with connection:
        connection.settimeout(_until(deadline) + MARGIN_SECONDS)
        try:
            connection.sendall(f"{GREETING} {process} {processes}\n".encode())
            greeting, _, verdict = _receive(connection).partition(" ")
        except OSError:
            greeting = verdict = ""
    if greeting != GREETING:
        raise ExperimentError(
            f"process {process} got no answer of process 0 at {coordinator} within {timeout:g} s: "
            "another program listens there, or process 0 has ended."
        )
    if verdict != COMPLETE:
        raise ExperimentError(verdict)
