"""The relay that delays frames."""

import os
import socket
import threading
import time

from experiments.lab.delay import relay


def test_frames_come_later_and_in_order() -> None:
    pairs = [socket.socketpair(type=socket.SOCK_SEQPACKET) for _ in range(2)]
    (near, first), (far, second) = pairs
    ends, until = os.pipe()
    others = {first.fileno(): second.fileno(), second.fileno(): first.fileno()}
    thread = threading.Thread(target=relay, args=(others, 0.1, ends))
    thread.start()
    begun = time.monotonic()
    for frame in (b"one", b"two", bytes(60_000)):
        near.send(frame)
    far.send(b"back")
    assert [far.recv(2**17) for _ in range(3)] == [b"one", b"two", bytes(60_000)]
    assert near.recv(2**17) == b"back" and 0.1 <= time.monotonic() - begun < 5
    os.close(until)
    thread.join(5)
    assert not thread.is_alive()
    for pair in pairs:
        for end in pair:
            end.close()
    os.close(ends)
