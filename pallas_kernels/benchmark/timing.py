"""The time of calls that are queued: by the wall clock, and by JAX's profiler."""

import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

LONG_ENOUGH = 0.02  # Seconds of one sample; the wait at its end is negligible.
MOST_CALLS = 1000


Key = TypeVar("Key", bound=Hashable)


class Candidate(NamedTuple):
    """Something to time: `call` starts it, and `wait` returns when its result is ready."""

    call: Callable[[], Any]
    wait: Callable[[Any], object]


class Times(NamedTuple):
    """Raw samples: seconds per call, each the mean of `calls` queued calls."""

    calls: int
    seconds: list[float]

    @property
    def median(self) -> float:
        """The median, in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The interquartile range, divided by the median."""
        if len(self.seconds) < 2:
            return 0.0
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (third - first) / self.median


def _sample(candidate: Candidate, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        result = candidate.call()
    candidate.wait(result)
    return (time.perf_counter() - start) / calls


def time_in_turn(
    candidates: Mapping[Key, Candidate], samples: int, *, queue: bool
) -> dict[Key, Times]:
    """Samples of each candidate, taken in turn, so that a busy moment affects all equally.

    Args:
      candidates: By name. The first call of each is not counted; it compiles.
      samples: The number of samples of each candidate.
      queue: Whether a sample consists of as many calls as take `LONG_ENOUGH`, and waits only for
        the last. Then the device must run calls in their order. Else a sample is one call.
    """
    calls = {}
    for name, candidate in candidates.items():
        candidate.wait(candidate.call())
        calls[name] = 1
        while queue and calls[name] < MOST_CALLS:
            seconds = _sample(candidate, calls[name])
            if calls[name] * seconds >= LONG_ENOUGH:
                break
            needed = round(LONG_ENOUGH / seconds) + 1
            calls[name] = min(MOST_CALLS, max(2 * calls[name], needed))
    taken: dict[Key, list[float]] = {name: [] for name in candidates}
    for _ in range(samples):
        for name, candidate in candidates.items():
            taken[name].append(_sample(candidate, calls[name]))
    return {name: Times(calls[name], seconds) for name, seconds in taken.items()}


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
