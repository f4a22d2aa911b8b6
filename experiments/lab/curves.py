"""The training loop of both frameworks: the same evaluations at the same steps."""

import math
import time
from collections.abc import Callable
from typing import Any

SPLITS = ("held_out", "validation")


def train(
    step: Callable[[int], float], evaluate: Callable[[], float], steps: int, evaluate_every: int
) -> dict[str, Any]:
    """Trains, and evaluates every `evaluate_every` steps.

    Training ends early if an evaluated loss is not finite.

    Args:
      step: Makes the batch of a number, does a step, waits for it, and returns its loss.
      evaluate: Returns the evaluated loss, equal on all workers.
      steps: The number of steps.
      evaluate_every: The steps between evaluations.

    Returns:
      `losses` per step, and per evaluation `steps`, `evaluated` and `seconds`: the time of all
      steps before it, without that of evaluations. The first evaluation precedes
      training, and the last one follows it.

    Raises:
      ValueError: If `evaluate_every` is below 1.

    Example:
      >>> curve = train(lambda number: 1 / (number + 1), lambda: 0.5, steps=3, evaluate_every=2)
      >>> curve["steps"], curve["evaluated"], len(curve["losses"])
      ([0, 2, 3], [0.5, 0.5, 0.5], 3)
    """
    if evaluate_every < 1:
        raise ValueError(f"evaluate_every must be at least 1, got {evaluate_every}.")
    curve: dict[str, Any] = {"steps": [], "evaluated": [], "seconds": [], "losses": []}
    seconds = 0.0
    for number in range(steps + 1):
        if number % evaluate_every == 0 or number == steps:
            curve["steps"].append(number)
            curve["evaluated"].append(evaluate())
            curve["seconds"].append(seconds)
            if not math.isfinite(curve["evaluated"][-1]):
                break
        if number < steps:
            began = time.perf_counter()
            curve["losses"].append(step(number))
            seconds += time.perf_counter() - began
    return curve
