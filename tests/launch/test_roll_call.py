"""The roll is called before JAX starts: who is missing, too many, or of another mind."""

import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from experiments.errors import ExperimentError
from experiments.roll_call import Address, answer, call, listen, parse_address


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
        assert error is None or isinstance(error, ExperimentError)
        return str(error) if error else None

    with ThreadPoolExecutor(len(numbers)) as pool:
        return [told(each) for each in [pool.submit(take_part, *each) for each in numbers]]


def test_all_are_there() -> None:
    assert hold((0, 4), (1, 4), (2, 4), (3, 4)) == [None] * 4
    assert hold((0, 1)) == [None]


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ([0], "processes 1, 2 and 3 have not started within 1 s, of 4 in all."),
        ([0, 2], "processes 1 and 3 have not started within 1 s, of 4 in all."),
        ([0, 1, 3], "process 2 has not started within 1 s, of 4 in all."),
    ],
)
def test_who_is_missing_is_named_to_all(present: list[int], missing: str) -> None:
    assert hold(*[(process, 4) for process in present], timeout=1.0) == [missing] * len(present)


def test_the_wrong_number_of_processes() -> None:
    told = "process 1 was told of 3 processes and process 0 of 2; start all with the same number."
    assert hold((0, 2), (1, 3)) == [told] * 2


def test_two_with_one_number() -> None:
    told = hold((0, 3), (1, 3), (1, 3))
    assert told == ["two processes were told that they are process 1; number them apart."] * 3


def test_a_coordinator_that_cannot_be_reached() -> None:
    address, started = free(), time.monotonic()
    with pytest.raises(ExperimentError, match=rf"process 1 cannot reach .* {address}, within 1 s"):
        answer(address, 1, 2, 1.0)
    assert 0.5 < time.monotonic() - started < 10
    with pytest.raises(ExperimentError, match=r"within 0\.5 s: "):
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
        with pytest.raises(ExperimentError, match="another program listens there"):
            answer(Address("127.0.0.1", server.getsockname()[1]), 1, 2, 2.0)
        thread.join()


def test_strangers_are_passed_over() -> None:
    address = free()
    with ThreadPoolExecutor(2) as pool:
        called = pool.submit(call, address, 2, 20.0)
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 5000, b"jaxcomm-roll-call x y\n"):
            while True:
                try:
                    stranger = socket.create_connection(address, timeout=5)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
            with stranger:
                stranger.sendall(words)
        pool.submit(answer, address, 1, 2, 20.0).result()
        called.result()


def test_a_port_in_use_and_an_address_elsewhere() -> None:
    with listen(Address("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1])
        with pytest.raises(ExperimentError, match=f"at {address}: the port is in use; choose"):
            call(address, 2, 1.0)
    with pytest.raises(ExperimentError, match=r"192\.0\.2\.1:0: Cannot assign requested address"):
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


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ExperimentError, match="write HOST:PORT"):
        parse_address(text)
