"""What the kernel counts of the sockets of this process, and of the loopback interface."""

import os
import socket
import struct
import time
from pathlib import Path
from typing import NamedTuple

WAIT_SECONDS = 0.1
SENT = 200  # Of tcpi_bytes_sent in Linux's struct tcp_info, before tcpi_bytes_retrans.
HEADERS = 20 + 32
"""Bytes of a packet that the loopback interface counts beside its payload: of IPv4, and of TCP with
the times that Linux adds."""


class Sent(NamedTuple):
    """What was sent.

    Attributes:
      payload: Bytes of all TCP sockets of this process, without those that were sent again.
      repeated: Bytes that were sent again: TCP takes an acknowledgement for lost if it is late, as
        on a busy machine.
      loopback: Bytes on the loopback interface, of all processes in this network namespace.
      packets: Packets there, with those that only acknowledge.
    """

    payload: int
    repeated: int
    loopback: int
    packets: int

    def since(self, before: "Sent") -> "Sent":
        return Sent(*(now - then for now, then in zip(self, before, strict=True)))


def sent() -> Sent:
    """What was sent so far."""
    time.sleep(WAIT_SECONDS)
    payload = repeated = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(descriptor)))
        except OSError:
            continue
        with connection:
            if connection.family != socket.AF_UNIX and connection.type == socket.SOCK_STREAM:
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
                total, again = struct.unpack_from("QQ", information, SENT)
                payload, repeated = payload + total - again, repeated + again
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    (counts,) = (line.split()[1:] for line in lines if line.split()[0] == "lo:")
    return Sent(payload, repeated, int(counts[8]), int(counts[9]))
