"""The learning rate of each method: the one of a grid with the least validation loss."""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any


def mean_losses(trials: Iterable[dict[str, Any]]) -> dict[float, float]:
    """The validation loss of each learning rate, over seeds; infinite where a run diverged."""
    groups: dict[float, list[float]] = {}
    for trial in trials:
        groups.setdefault(trial["learning_rate"], []).append(trial["validation_loss"])
    means = {rate: statistics.mean(losses) for rate, losses in sorted(groups.items())}
    return {rate: mean if math.isfinite(mean) else math.inf for rate, mean in means.items()}


def choose(losses: Mapping[float, float]) -> float:
    """The rate of least loss, the smallest of those alike."""
    return min(sorted(losses), key=lambda rate: losses[rate])


def is_at_edge(rate: float, losses: Mapping[float, float]) -> bool:
    """Whether a rate beyond the grid might have done better."""
    return len(losses) > 1 and rate in (min(losses), max(losses))
