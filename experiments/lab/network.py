"""A private machine: one network namespace per worker, bridges, and `tc` as the bottleneck."""

import os
import re
import subprocess
import sys
from typing import NamedTuple

from experiments.errors import ExperimentError
from experiments.lab import delay

ISOLATED = "LAB_IS_ISOLATED"
SUBNET = "10.77.0"
SWITCH, DEVICE = "switch", "eth0"
BURST = "96kb"  # More than one segment of 64 KB, which tbf would cut into packets.
QUEUE = "50ms"
CONGESTION_CONTROL = "reno"  # In every Linux kernel; the default differs between machines.
UNSHAPED = "unshaped"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class LabError(ExperimentError):
    """The machine does not permit the lab, or a worker has ended."""


def run(*command: str) -> str:
    """Runs a program and returns its output.

    Raises:
      LabError: If the program fails, with its last line.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        *_, last = [f"exit code {done.returncode}", *done.stderr.strip().splitlines()]
        raise LabError(f"`{' '.join(command)}` fails: {last.rstrip('.')}")
    return done.stdout


def isolate() -> None:
    """Runs this command again, once, in private namespaces of networks and mounts.

    The process goes on as a new program, since namespaces are entered before any thread starts. The
    kernel removes them when the last process has ended, even if it was killed. So the lab leaves
    nothing behind, and several labs do not meet.

    Raises:
      LabError: If the kernel does not permit it.
    """
    if os.environ.pop(ISOLATED, ""):
        run("mount", "-t", "tmpfs", "tmpfs", "/run")  # `ip netns` keeps names of namespaces here.
        return
    as_root = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    unshare = ("unshare", *as_root, "--net", "--mount")
    try:
        run(*unshare, "true")
    except (LabError, OSError) as error:
        raise LabError(
            f"network namespaces are not permitted here: {error}. The lab needs Linux, iproute2, "
            "util-linux, and root or unprivileged user namespaces (sysctl "
            "kernel.unprivileged_userns_clone=1)."
        ) from error
    os.execvpe(unshare[0], [*unshare, *sys.orig_argv], {**os.environ, ISOLATED: "yes"})


def bits_per_second(rate: str) -> float:
    """The number of a bandwidth.

    Example:
      >>> bits_per_second("1.5gbit"), bits_per_second("unshaped")
      (1500000000.0, inf)

    Raises:
      LabError: If `tc` would not read it, or it is 0.
    """
    if rate == UNSHAPED:
        return float("inf")
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if not found or float(found[1]) == 0:
        raise LabError(
            f"a bandwidth is a number with kbit, mbit or gbit, such as 200mbit, or {UNSHAPED}; "
            f"got {rate!r}"
        )
    return float(found[1]) * UNITS[found[2]]


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

    def __init__(self, workers: int, milliseconds: float = 0.0):
        """Builds the network, whose messages from worker to worker and back take so long.

        `isolate` comes first.
        """
        self.workers, self.link = workers, Link()
        run("ip", "netns", "add", SWITCH)
        for half in "01":
            self._switch("add", f"bridge{half}", "type", "bridge")
            self._switch("set", f"bridge{half}", "up")
        self._switch("add", "trunk0", "type", "veth", "peer", "name", "trunk1")
        for half in "01":
            self._switch("set", f"trunk{half}", "master", f"bridge{half}", "up")
        names = [worker_name(worker) for worker in range(workers)]
        for name in names:
            run("ip", "netns", "add", name)
        if milliseconds:  # Four crossings there and back.
            pairs = [f"{name}/{DEVICE}=port{worker}" for worker, name in enumerate(names)]
            self.relay = delay.start(milliseconds / 4, pairs)
        for worker, name in enumerate(names):
            if not milliseconds:
                ends = ("type", "veth", "peer", "name", f"port{worker}", "netns", SWITCH)
                run("ip", "link", "add", DEVICE, "netns", name, *ends)
            run("ip", "-n", name, "address", "add", f"{worker_address(worker)}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                run("ip", "-n", name, "link", "set", device, "up")
            self._switch("set", f"port{worker}", "master", "bridge0", "up")
            setting = f"net.ipv4.tcp_congestion_control={CONGESTION_CONTROL}"
            run("ip", "netns", "exec", name, "sysctl", "-q", "-w", setting)

    def _switch(self, *arguments: str) -> None:
        run("ip", "-n", SWITCH, "link", *arguments)

    def _ends(self, link: Link) -> list[tuple[str, str]]:
        """The namespaces and devices of the shaped ends."""
        if link.rate == UNSHAPED:
            return []
        if link.clusters == 2:
            return [(SWITCH, "trunk0"), (SWITCH, "trunk1")]
        own = [(worker_name(worker), DEVICE) for worker in range(self.workers)]
        return own + [(SWITCH, f"port{worker}") for worker in range(self.workers)]

    def shape(self, link: Link) -> None:
        """Replaces the limits. Connections stay open."""
        for space, device in self._ends(self.link):
            run("tc", "-n", space, "qdisc", "delete", "dev", device, "root")
        for worker in range(self.workers):
            half = int(link.clusters == 2 and worker >= self.workers // 2)
            self._switch("set", f"port{worker}", "master", f"bridge{half}")
        bucket = ("root", "tbf", "rate", link.rate, "burst", BURST, "latency", QUEUE)
        for space, device in self._ends(link):
            run("tc", "-n", space, "qdisc", "add", "dev", device, *bucket)
        self.link = link
