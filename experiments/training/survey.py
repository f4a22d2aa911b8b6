"""What the survey trains: the settings of its tasks, the grids of its methods, and their runs."""

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.methods import ALL_LABELS, KINDS, SELECTED, WHY_THEY_LOSE, expand, parse_variant
from experiments.training.trainer import load_task, make_trainer

SHORT = "digits"
SCORED_EXAMPLES = 2000  # Training examples of longer tasks; the score of all takes too long.
TRIAL_PART = 4  # A trial of a longer task has a quarter of the steps of a run.


def train(config: Any, setting: Mapping[str, Any]) -> Any:
    """What trains a setting; see `make_trainer`."""
    (name,) = (name for name in config.tasks if name.partition(":")[0] == setting["task"])
    steps, trial, scored = config.long_steps, config.long_steps // TRIAL_PART, SCORED_EXAMPLES
    if name == SHORT:
        steps, trial, scored = config.steps, config.steps, None
    return make_trainer(
        config,
        setting["method"],
        setting["optimizer"],
        load_task(name, scored),
        steps=steps,
        log_every=max(1, steps // config.points),
        trial_steps=max(1, trial),
        simulated=True,
    )


@functools.cache
def settings(config: Any) -> Sequence[Mapping[str, Any]]:
    """All methods on digits, and the selected ones on other tasks; or the methods of the config.

    Raises:
      ExperimentError: If an option is invalid.
    """
    # The warning is about few levels, which are intended here.
    warnings.filterwarnings("ignore", "`bits`=", UserWarning)
    found = [
        {"task": task, "optimizer": optimizer, "method": method}
        for task in dict.fromkeys(name.partition(":")[0] for name in config.tasks)
        for optimizer in dict.fromkeys(config.optimizers)
        for method in expand(config.methods, ALL_LABELS if task == SHORT else SELECTED)
    ]
    for setting in found:
        train(config, setting)
    return found


def grid(config: Any, setting: Mapping[str, Any]) -> Mapping[str, tuple[Any, ...]]:
    """The learning rates, and the options of the method; then every second rate."""
    options = parse_variant(setting["method"]).grid
    rates = sorted(set(config.learning_rates))
    return {"learning_rate": (tuple(rates[1::2] if options and rates[1:] else rates),), **options}


REASONS = {KINDS[kind]: reason for kind, reason in WHY_THEY_LOSE.items()}


def kind(group: Any) -> str:
    """How the update of the method of a group differs from the mean."""
    return KINDS[parse_variant(group.keys["method"]).kind]
