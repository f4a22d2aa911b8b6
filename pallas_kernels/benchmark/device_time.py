"""Seconds on the device by JAX's profiler, beside the wall clock."""

import pathlib
import tempfile
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from pallas_kernels.benchmark.timing import Candidate

# What the profiler calls the programs of a GPU and of a TPU.
LINES = ("Stream", "XLA Ops")


def busy_seconds(planes: Iterable[Any]) -> float | None:
    """Seconds in which the first device ran something; None if no plane is of a device.

    Events of one line never overlap on a TPU; on a GPU those of several streams are merged.
    """
    for plane in planes:
        if not plane.name.startswith("/device:"):
            continue
        spans = sorted(
            (event.start_ns, event.start_ns + event.duration_ns)
            for line in plane.lines
            if line.name.startswith(LINES)
            for event in line.events
        )
        if not spans:
            continue
        busy, end = 0.0, float("-inf")
        for start, stop in spans:
            busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return busy * 1e-9
    return None


class Profile(NamedTuple):
    """What the profiler says of a device; None where it sees none."""

    seconds: float | None  # Per call, on the device.
    bytes_per_second: float | None  # Of its memory, by its clock and width.


def profile(candidate: Candidate, calls: int) -> Profile:
    """Seconds per call on the device, and what its memory could move at most."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                result = candidate.call()
            candidate.wait(result)
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        if not files:
            return Profile(None, None)
        planes = list(jax.profiler.ProfileData.from_file(str(files[-1])).planes)
    busy = busy_seconds(planes)
    peaks = [
        float(value)
        for plane in planes
        if plane.name.startswith("/device:")
        for name, value in plane.stats
        if name == "memory_bandwidth"
    ]
    return Profile(None if busy is None else busy / calls, max(peaks, default=None))
