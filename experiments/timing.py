"""Times functions."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def medians(
    functions: Mapping[str, Callable[[], Any]],
    repetitions: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each function; timed in turn, so that other load affects all equally."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():  # Compiles.
        jax.block_until_ready(function())
    for _ in range(repetitions):
        for name, function in functions.items():
            start = clock()
            jax.block_until_ready(function())
            seconds[name].append(clock() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}
