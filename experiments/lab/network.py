"""Links between workers: one network namespace per worker, bridges, and `tc` as the bottleneck."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from experiments.lab.isolation import LabError, run

SUBNET = "10.77.0"
SWITCH, DEVICE = "switch", "eth0"
BURST = "96kb"  # More than one segment of 64 KB, which tbf would cut into packets.
QUEUE = "50ms"
CONGESTION_CONTROL = "reno"  # In every Linux kernel; the default differs between machines.
UNSHAPED = "unshaped"
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_DELAY = re.compile(r"\d+(?:\.\d+)?(?:us|ms|s)")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bits_per_second(rate: str) -> float:
    """The number of a bandwidth.

    Example:
      >>> bits_per_second("1.5gbit"), bits_per_second("unshaped")
      (1500000000.0, inf)

    Raises:
      ValueError: If `tc` would not read it, or it is 0.
    """
    if rate == UNSHAPED:
        return float("inf")
    found = _RATE.fullmatch(rate)
    if not found or float(found[1]) == 0:
        raise ValueError(
            f"a bandwidth is a number with kbit, mbit or gbit, such as 200mbit, or {UNSHAPED}; "
            f"got {rate!r}"
        )
    return float(found[1]) * _UNITS[found[2]]


class Link(NamedTuple):
    """What limits the messages of workers.

    Attributes:
      rate: The bandwidth in each direction, such as `200mbit`, or `unshaped`.
      clusters: With 1, each worker has a link of this bandwidth to a switch. With 2, workers are
        in two halves that are fast inside, and the halves share one link of this bandwidth.
    """

    rate: str = UNSHAPED
    clusters: int = 1

    @property
    def name(self) -> str:
        """The name in tables."""
        return self.rate if self.clusters == 1 else f"2 clusters, {self.rate}"


def check_delay(delay: str | None) -> None:
    """Raises a `LabError` unless the delay is None or such as `5ms`."""
    if delay is not None and not _DELAY.fullmatch(delay):
        raise LabError(f"--delay is a number with us, ms or s, such as 5ms; got {delay!r}.")


def worker_name(worker: int) -> str:
    """The network namespace of a worker."""
    return f"worker{worker}"


def worker_address(worker: int) -> str:
    """The address of a worker."""
    return f"{SUBNET}.{worker + 1}"


class Network:
    """Workers at a switch, unshaped at first.

    `worker/eth0 === switch/port -- bridge0`, and `bridge1 -- trunk1 === trunk0 -- bridge0` for two
    clusters. `===` is a pair of virtual devices; both of its ends are shaped, one per direction.
    """

    def __init__(self, workers: int, delay: str | None = None):
        """Builds the network. `isolate` comes first."""
        check_delay(delay)
        self.workers, self._delay = workers, delay
        self.link = Link()
        run("ip", "netns", "add", SWITCH)
        for bridge in ("bridge0", "bridge1"):
            self._switch("link", "add", bridge, "type", "bridge")
            self._switch("link", "set", bridge, "up")
        self._switch("link", "add", "trunk0", "type", "veth", "peer", "name", "trunk1")
        for half in ("0", "1"):
            self._switch("link", "set", f"trunk{half}", "master", f"bridge{half}", "up")
        for worker in range(workers):
            name = worker_name(worker)
            run("ip", "netns", "add", name)
            ends = ("type", "veth", "peer", "name", f"port{worker}", "netns", SWITCH)
            run("ip", "link", "add", DEVICE, "netns", name, *ends)
            run("ip", "-n", name, "address", "add", f"{worker_address(worker)}/24", "dev", DEVICE)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", DEVICE, "up")
            self._switch("link", "set", f"port{worker}", "master", "bridge0", "up")
            setting = f"net.ipv4.tcp_congestion_control={CONGESTION_CONTROL}"
            run("ip", "netns", "exec", name, "sysctl", "-q", "-w", setting)
        if delay is not None:
            self._require_netem()

    def _switch(self, *arguments: str) -> None:
        run("ip", "-n", SWITCH, *arguments)

    def _require_netem(self) -> None:
        at = ("tc", "-n", SWITCH, "qdisc")
        try:
            run(*at, "add", "dev", "trunk0", "root", "netem", "delay", "1ms")
        except LabError as error:
            raise LabError("--delay needs the kernel module sch_netem, which is absent.") from error
        run(*at, "delete", "dev", "trunk0", "root")

    def _ends(self, clusters: int) -> Iterator[tuple[str, str]]:
        """The namespaces and devices of the shaped ends."""
        if clusters == 2:
            yield from ((SWITCH, "trunk0"), (SWITCH, "trunk1"))
            return
        for worker in range(self.workers):
            yield from ((worker_name(worker), DEVICE), (SWITCH, f"port{worker}"))

    def shape(self, link: Link) -> None:
        """Replaces the limits. Connections stay open. An unshaped link has no delay either."""
        if self.link.rate != UNSHAPED:
            for space, device in self._ends(self.link.clusters):
                run("tc", "-n", space, "qdisc", "delete", "dev", device, "root")
        for worker in range(self.workers):
            half = 1 if link.clusters == 2 and worker >= self.workers // 2 else 0
            self._switch("link", "set", f"port{worker}", "master", f"bridge{half}")
        for space, device in self._ends(link.clusters) if link.rate != UNSHAPED else ():
            at = ("tc", "-n", space, "qdisc", "add", "dev", device)
            bucket = ("tbf", "rate", link.rate, "burst", BURST, "latency", QUEUE)
            run(*at, "root", "handle", "1:", *bucket)
            if self._delay and not device.startswith("port"):  # Once per direction.
                run(*at, "parent", "1:1", "netem", "delay", self._delay)
        self.link = link
