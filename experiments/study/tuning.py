"""Chooses the learning rate of a grid with the least validation loss."""

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any


def mean_losses(trials: Iterable[dict[str, Any]]) -> dict[float, float]:
    """The mean validation loss per learning rate over seeds; infinite if a run diverged."""
    groups: dict[float, list[float]] = {}
    for trial in trials:
        groups.setdefault(trial["learning_rate"], []).append(trial["validation_loss"])
    means = {rate: statistics.mean(losses) for rate, losses in sorted(groups.items())}
    return {rate: mean if math.isfinite(mean) else math.inf for rate, mean in means.items()}


def choose(losses: Mapping[float, float]) -> float:
    """The rate with the least loss; the smallest rate of a tie."""
    return min(sorted(losses), key=lambda rate: losses[rate])


def is_at_edge(rate: float, losses: Mapping[float, float]) -> bool:
    """Whether the rate is an end of the grid, so a rate outside the grid may be better."""
    return len(losses) > 1 and rate in (min(losses), max(losses))
