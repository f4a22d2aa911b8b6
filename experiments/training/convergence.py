"""Runs of the cells of the table of convergence, and what is fitted to them."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from experiments.cli.choices import select
from experiments.cli.errors import ExperimentError
from experiments.methods.convergence import CELLS
from experiments.tasks.objectives import Objective
from experiments.training import counterexamples
from experiments.training.moments import exact_distances_of_mean
from experiments.training.power_laws import binned, fit_exponent
from experiments.training.rates import (
    CHUNK,
    DISTANCES,
    Schedule,
    eventwise,
    make_objective,
    make_schedule,
    run,
    start,
    stepwise,
)

EXACT, EXAMPLE = "exact mean", "counterexample"
BINS, TAIL = 10, 16  # The fit is over the last 15/16 of the steps, in so many intervals.
HORIZONS = (16, 4, 1)  # Divisors of the steps of runs with a constant rate.


def exact_error(objective: Objective, schedule: Schedule, steps: int) -> float:
    """The exact expectation of `error` of a run of synchronous SGD."""
    rates = np.float64(schedule.scale) / (schedule.offset + schedule.slope * np.arange(steps))
    first = np.asarray(start(objective, schedule), np.float64)
    return float(exact_distances_of_mean(objective, rates, first)[steps // 2 :].mean())


def settings(config: Any) -> list[dict[str, Any]]:
    """All settings; those that share a program follow each other.

    The exponents in the steps are fitted with the most workers, and those in the constant too.

    Raises:
      ExperimentError: If an option is invalid.
    """
    cells = select(config.cells, [*CELLS], "--cells")
    problems = select(config.problems, [*DISTANCES], "--problems")
    if any(workers < 4 or workers & (workers - 1) for workers in config.workers):
        raise ExperimentError("--workers must be powers of 2, of at least 4: a hypercube has them.")
    for name in ("steps", "event_steps"):
        if getattr(config, name) % (least := CHUNK * max(HORIZONS)):
            raise ExperimentError(
                f"--{name.replace('_', '-')} {getattr(config, name)} is not divisible by {least}."
            )
    if config.seeds < 2:
        raise ExperimentError(f"--seeds must be at least 2 for an interval, got {config.seeds}.")
    counts, most = sorted({*config.workers}, reverse=True), max(config.workers)
    found: list[dict[str, Any]] = []
    for name in cells:
        cell = CELLS[name]
        steps = config.event_steps if cell.of_strategy.is_simulated else config.steps
        for workers, strength in [(n, 0) for n in counts] + [
            (most, strength) for strength in range(1, cell.strengths)
        ]:
            horizons = [steps // part for part in HORIZONS]
            for problem in problems if strength == 0 else problems[:1]:
                lengths = [steps]
                if problem == "constant rate":
                    lengths = horizons if workers == most else horizons[1:2]
                found += [
                    {"problem": problem, "cell": name, "workers": workers, "strength": strength,
                     "steps": length}
                    for length in lengths
                ]  # fmt: skip
    examples = [
        {"problem": EXAMPLE, "cell": name, "workers": workers, "strength": 0, "steps": steps}
        for name, (_, workers, steps) in counterexamples.EXAMPLES.items()
    ]  # fmt: skip
    return [*examples, *found]


def train(config: Any, setting: Mapping[str, Any]) -> Any:
    """What runs a setting."""
    if setting["problem"] == EXAMPLE:
        return counterexamples.train
    return Trainer(config, setting)


class Trainer:
    """Runs all seeds of a setting at once, when the first is requested."""

    def __init__(self, config: Any, setting: Mapping[str, Any]):
        """Makes the program; it is compiled by its first call.

        Args:
          config: The config of the study.
          setting: Has the cell, the number of workers and the number of the strength.
        """
        self._seeds, self._cell = range(config.seeds), CELLS[setting["cell"]]
        self._most = max(config.workers)
        is_simulated = self._cell.of_strategy.is_simulated
        self._steps = config.event_steps if is_simulated else config.steps
        make = eventwise if is_simulated else stepwise
        self._program = make(self._cell, setting["strength"], setting["workers"])
        self._found: dict[tuple, Any] = {}

    def __call__(
        self, setting: Mapping[str, Any], seed: int, parameters: Any, *, validation: bool
    ) -> Iterator[dict[str, Any]]:
        """Yields the points of one seed, and at last what is fitted to them."""
        problem, workers, strength = (setting[n] for n in ("problem", "workers", "strength"))
        steps, cell = setting["steps"], self._cell
        objective = make_objective(problem, workers)
        share = workers / self._most * (self._steps // HORIZONS[0]) / steps
        schedule = make_schedule(problem, cell, strength, workers, share)
        key = tuple(setting.values())
        if key not in self._found:
            self._found = {key: run(self._program, objective, schedule, self._seeds, steps)}
        distances, gradients = (each[[*self._seeds].index(seed)] for each in self._found[key])
        strategy = cell.of_strategy
        values = {
            "architecture": strategy.architecture,
            "synchronization": strategy.synchronization,
            "compression": cell.compression or "exact",
            "symbol": cell.symbol,
            "constant": cell.value(strength, workers),
            "predicted_constant": cell.constant if cell.symbol else math.nan,
        }
        if problem == "constant rate":
            yield {**values, "error": gradients.mean()}
            return
        offset = float(schedule.offset)
        times = offset + CHUNK * (np.arange(len(distances)) + 0.5)
        first = len(times) // TAIL
        across, up = binned(times[first:], distances[first:], BINS)
        if (strength, workers) == (0, self._most):
            for x, y in zip(across, up, strict=True):
                yield {"step": x - offset, "error": y}
        exact = (
            exact_error(objective, schedule, steps)
            if problem == "quadratic" and setting["cell"] == EXACT
            else math.nan
        )
        yield {
            **values,
            "error": distances[len(distances) // 2 :].mean(),
            "exact_error": exact,
            "exponent": fit_exponent(across, up),
        }
