"""The roll is called before JAX starts: who is missing, too many, or of another mind."""

import contextlib
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from jaxcomm.launch import LaunchError, _roll_call
from jaxcomm.launch._address import Address, listen, parse_address
from jaxcomm.launch._roll_call import answer, call


def free() -> Address:
    with listen(Address("127.0.0.1", 0)) as server:
        return Address("127.0.0.1", server.getsockname()[1])


def hold(*numbers: tuple[int, int], timeout: float = 20.0) -> list[str | None]:
    """A roll call of processes `(number, of how many)`: what each is told, None if all is well."""
    address = free()

    def take_part(process: int, processes: int) -> None:
        if process:
            answer(address, process, processes, timeout)
        else:
            call(address, processes, timeout)

    def told(future: Future) -> str | None:
        error = future.exception()
        assert error is None or isinstance(error, LaunchError)
        return str(error) if error else None

    with ThreadPoolExecutor(len(numbers)) as pool:
        return [told(each) for each in [pool.submit(take_part, *each) for each in numbers]]


def test_all_are_there() -> None:
    assert hold((0, 4), (1, 4), (2, 4), (3, 4)) == [None] * 4
    assert hold((0, 1)) == [None]


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ([0], "processes 1, 2 and 3 of 4 have not started within 1 s."),
        ([0, 2], "processes 1 and 3 of 4 have not started within 1 s."),
        ([0, 1, 3], "process 2 of 4 has not started within 1 s."),
    ],
)
def test_who_is_missing_is_named_to_all(present: list[int], missing: str) -> None:
    assert hold(*[(process, 4) for process in present], timeout=1.0) == [missing] * len(present)


def test_the_wrong_number_of_processes() -> None:
    told = (
        "process 1 expects 3 processes and process 0 expects 2; start all with the same number of "
        "processes."
    )
    assert hold((0, 2), (1, 3)) == [told] * 2


def test_two_with_one_number() -> None:
    told = hold((0, 3), (1, 3), (1, 3))
    error = "two processes have the number 1; give each process a different number."
    assert told == [error] * 3


def test_a_coordinator_that_cannot_be_reached() -> None:
    address, started = free(), time.monotonic()
    with pytest.raises(LaunchError, match=rf"process 1 cannot reach .* {address}, within 1 s"):
        answer(address, 1, 2, 1.0)
    assert 0.5 < time.monotonic() - started < 10
    with pytest.raises(LaunchError, match=r"within 0\.5 s: "):
        answer(Address("no-such-host.invalid", 1), 1, 2, 0.5)


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00\x06\x04\n"])
def test_another_program_at_the_coordinators_port(says: bytes) -> None:
    with listen(Address("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(says)
                connection.recv(100)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(LaunchError, match="another program listens there"):
            answer(Address("127.0.0.1", server.getsockname()[1]), 1, 2, 2.0)
        thread.join()


SECRET = "a secret"


def connect(address: Address) -> socket.socket:
    """A connection to process 0, which may be about to listen."""
    while True:
        try:
            return socket.create_connection(address, timeout=5)
        except ConnectionRefusedError:
            time.sleep(0.05)


def greet(process: int, processes: int, token: str = SECRET) -> bytes:
    signature = _roll_call._sign(token, process, processes)
    return f"jaxcomm-roll-call {process} {processes} {signature}\n".encode()


STRANGERS = {
    "silent": b"",
    "of another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "who says too much": b"x" * 50_000,
    "of no number": b"jaxcomm-roll-call x y z\n",
    "without a token": b"jaxcomm-roll-call 1 2\n",
    "with a false number and no token": b"jaxcomm-roll-call 1 3\n",
    "with a signature of letters": "jaxcomm-roll-call 1 2 \u00e9\n".encode(),
    "with another token": greet(1, 2, "guessed"),
    "with another number and token": greet(1, 3, "guessed"),
    "of a number beyond": greet(0, 2),
    "of a large number": b"jaxcomm-roll-call " + b"9" * 900 + b" 2 0\n",
}


def test_strangers_are_passed_over() -> None:
    address = free()
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as open_ones:
        called = pool.submit(call, address, 2, 20.0, SECRET)
        for words in STRANGERS.values():
            stranger = open_ones.enter_context(connect(address))
            stranger.sendall(words)
        for _ in range(2 * _roll_call.MOST_SILENT):  # More than process 0 listens to at once.
            open_ones.enter_context(connect(address))
        pool.submit(answer, address, 1, 2, 20.0, SECRET).result()
        called.result()


def test_one_with_another_token_is_not_let_in() -> None:
    address = free()
    with ThreadPoolExecutor(2) as pool:
        called = pool.submit(call, address, 2, 1.5, SECRET)
        answered = pool.submit(answer, address, 1, 2, 1.5, "another")
        with pytest.raises(LaunchError, match=r"process 1 got no .* or its JAXCOMM_TOKEN differs"):
            answered.result()
        with pytest.raises(LaunchError, match="A process with a different JAXCOMM_TOKEN was ref"):
            called.result()


def test_one_who_answers_for_process_0_without_the_token_is_not_believed() -> None:
    with listen(Address("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        address = Address("127.0.0.1", server.getsockname()[1])
        answered = pool.submit(answer, address, 1, 2, 5.0, SECRET)
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"jaxcomm-roll-call 0 complete\n")
            with pytest.raises(LaunchError, match="another program listens there"):
                answered.result()


def drip(connection: socket.socket, words: bytes, until: threading.Event) -> None:
    """Says a letter at a time, each long before anybody loses patience with silence."""
    with contextlib.suppress(OSError):
        for letter in words:
            connection.sendall(bytes([letter]))
            if until.wait(0.05):
                return


def test_callers_that_drip_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_roll_call, "PATIENCE_SECONDS", 0.4)
    address, done = free(), threading.Event()
    with ThreadPoolExecutor(8) as pool, contextlib.ExitStack() as open_ones:
        started = time.monotonic()
        called = pool.submit(call, address, 3, 1.5, SECRET)
        drippers = [open_ones.enter_context(connect(address)) for _ in range(4)]
        for dripper in drippers:
            pool.submit(drip, dripper, b"x" * 900, done)
        # One that is of the cluster is heard at once beside them, and the roll ends in time.
        answered = pool.submit(answer, address, 1, 3, 1.5, SECRET)
        with pytest.raises(LaunchError, match=r"process 2 of 3 has not started within 1\.5 s"):
            called.result()
        assert 1.4 < time.monotonic() - started < 4
        with pytest.raises(LaunchError, match="process 2 of 3 has not started"):
            answered.result()
        done.set()
        for dripper in drippers:  # They were parted from long ago.
            with contextlib.suppress(ConnectionError):
                assert dripper.recv(1) == b""


def test_one_caller_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_roll_call, "PATIENCE_SECONDS", 0.4)
    address, done = free(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        called = pool.submit(call, address, 2, 5.0, SECRET)
        with connect(address) as dripper:
            started = time.monotonic()
            pool.submit(drip, dripper, greet(1, 2), done)  # Which would take five seconds.
            with contextlib.suppress(ConnectionError):
                assert dripper.recv(1) == b""
            assert 0.2 < time.monotonic() - started < 3
            done.set()
        answer(address, 1, 2, 5.0, SECRET)
        called.result()


def test_a_coordinator_that_drips_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_roll_call, "MARGIN_SECONDS", 0.2)
    done = threading.Event()
    with listen(Address("127.0.0.1", 0)) as server, ThreadPoolExecutor(2) as pool:
        address, started = Address("127.0.0.1", server.getsockname()[1]), time.monotonic()
        answered = pool.submit(answer, address, 1, 2, 0.5, SECRET)
        connection, _ = server.accept()
        with connection:
            pool.submit(drip, connection, b"jaxcomm-roll-call " * 50, done)
            with pytest.raises(LaunchError, match="another program listens there"):
                answered.result()
            assert 0.5 < time.monotonic() - started < 3
            done.set()


def test_a_process_that_dies_while_waiting_may_come_back() -> None:
    address = free()
    with ThreadPoolExecutor(2) as pool:
        called = pool.submit(call, address, 3, 20.0, SECRET)
        for _ in range(3):
            with connect(address) as first:
                first.sendall(greet(1, 3))
                time.sleep(0.1)
        again = pool.submit(answer, address, 1, 3, 20.0, SECRET)
        time.sleep(0.1)
        answer(address, 2, 3, 20.0, SECRET)
        again.result()
        called.result()


def test_a_process_that_has_died_is_missing() -> None:
    address = free()
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(call, address, 3, 1.0, SECRET)
        with connect(address) as first:
            first.sendall(greet(1, 3))
        with pytest.raises(LaunchError, match="processes 1 and 2 of 3 have not started"):
            called.result()


def test_of_many_that_are_missing_the_first_are_named() -> None:
    with pytest.raises(LaunchError) as told:
        call(free(), 2**16, 0.1)
    assert str(told.value) == (
        "processes 1, 2, 3, 4, 5, 6, 7, 8 and 65527 more of 65536 have not started within 0.1 s."
    )


def test_a_port_in_use_and_an_address_elsewhere() -> None:
    with listen(Address("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1])
        with pytest.raises(LaunchError, match=f"at {address}: the port is in use; choose"):
            call(address, 2, 1.0)
    with pytest.raises(LaunchError, match=r"192\.0\.2\.1:0: Cannot assign requested address"):
        listen(Address("192.0.2.1", 0))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:1234", Address("10.0.0.1", 1234)),
        ("host:80", Address("host", 80)),
        ("[::1]:5", Address("::1", 5)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address and str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":1",
        "host:0",
        "host:65536",
        "host:x",
        "a..b:1",
        "a b:1",
        "h" * 64 + ":1",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(LaunchError, match="write HOST:PORT"):
        parse_address(text)
