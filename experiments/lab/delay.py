"""Delays of links, on kernels without netem: a process between pairs of TAP devices.

`python -m experiments.lab.delay MILLISECONDS SPACE/DEVICE=DEVICE ...` creates each pair, the first
one in a network namespace and the second in the namespace `switch`. Every frame waits between them.
The process ends, and with it the devices, when its standard input is closed.
"""

import collections
import fcntl
import os
import selectors
import struct
import subprocess
import sys
import time

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TAP, NO_PACKET_INFORMATION, HEADER_OF_OFFLOADS = 0x0002, 0x1000, 0x4000
CHECKSUMS_AND_SEGMENTS = 0x01 | 0x02 | 0x04  # Frames of 64 KB need few calls.
LARGEST = 2**17


def open_tap(name: str, space: str, device: str) -> int:
    """Makes a TAP device, and moves it to a namespace as `device`; returns its file."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = TAP | NO_PACKET_INFORMATION | HEADER_OF_OFFLOADS
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", name.encode(), flags))
    fcntl.ioctl(tap, TUNSETOFFLOAD, CHECKSUMS_AND_SEGMENTS)
    move = ("ip", "link", "set", name, "netns", space, "name", device)
    subprocess.run(move, check=True)
    return tap


def relay(others: dict[int, int], seconds: float, until: int) -> None:
    """Writes what is read from each device to the other one, so much later; ends with `until`."""
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    with selectors.DefaultSelector() as selector:
        for tap in (until, *others):
            selector.register(tap, selectors.EVENT_READ)
        while True:
            timeout = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
            for key, _ in selector.select(timeout):
                if key.fd not in others:
                    return
                due = time.monotonic() + seconds
                waiting.append((due, others[key.fd], os.read(key.fd, LARGEST)))
            while waiting and waiting[0][0] <= time.monotonic():
                _, tap, frame = waiting.popleft()
                try:
                    os.write(tap, frame)
                except (BlockingIOError, OSError):  # A device that is down or full drops it.
                    continue


def main(milliseconds: str, *pairs: str) -> None:
    """Runs the program."""
    others = {}
    for number, pair in enumerate(pairs):
        place, port = pair.split("=")
        first = open_tap(f"first{number}", *place.split("/"))
        second = open_tap(f"second{number}", "switch", port)
        others |= {first: second, second: first}
    print("ready", flush=True)
    relay(others, float(milliseconds) / 1e3, sys.stdin.fileno())


def start(milliseconds: float, pairs: list[str]) -> subprocess.Popen[str]:
    """Starts the process, and returns when the devices are there."""
    command = [sys.executable, "-m", "experiments.lab.delay", str(milliseconds), *pairs]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise OSError("No TAP devices: is there /dev/net/tun?")
    return process


if __name__ == "__main__":
    main(*sys.argv[1:])
