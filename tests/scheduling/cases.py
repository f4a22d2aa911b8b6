"""Random layers and links, and all partitions into consecutive layers."""

import itertools
from collections.abc import Iterator

import numpy as np

from jaxcomm.scheduling import AlphaBeta, LayerTimes


def random_case(seed: int, *, most: int = 12, codec: bool = True) -> tuple[LayerTimes, AlphaBeta]:
    """Layers of whole milliseconds and a link of every kind between free and very slow."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, most + 1))

    def seconds(least: int, highest: int) -> np.ndarray:
        return rng.integers(least, highest + 1, count).astype(float)

    zeros = np.zeros(count)
    times = LayerTimes(
        sizes=seconds(1, 40),
        backward=seconds(0, 20),
        encode=seconds(0, 5) if codec else zeros,
        decode=seconds(0, 5) if codec else zeros,
        forward=seconds(0, 10),
    )
    slowness = [0.25, 0.5, 1.0, 2.0]
    return times, AlphaBeta(float(rng.integers(0, 30)), float(rng.choice(slowness)))


def partitions(count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All partitions of `count` layers into groups of consecutive ones."""
    for cuts in itertools.product([False, True], repeat=count - 1):
        starts = [0, *(i + 1 for i, cut in enumerate(cuts) if cut)]
        ends = [*starts[1:], count]
        yield tuple(tuple(range(a, b)) for a, b in zip(starts, ends, strict=True))


def seconds_of(times: LayerTimes, link: AlphaBeta, groups: tuple[tuple[int, ...], ...]) -> float:
    """The seconds until all layers are decoded, by the recurrences of the model."""
    clock, free, arrived = 0.0, 0.0, []
    for group in groups:
        clock += sum(times.backward[i] + times.encode[i] for i in group)
        free = (
            max(free, clock)
            + link.latency
            + sum(times.sizes[i] for i in group) / (link.bytes_per_second)
        )
        arrived.append(free)
    for group, seconds in zip(groups, arrived, strict=True):
        clock = max(clock, seconds) + sum(times.decode[i] for i in group)
    return clock
