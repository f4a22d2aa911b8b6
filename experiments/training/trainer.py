"""Trains the runs and the trials of one method on one task, for a study."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from experiments.methods import Variant, parse_variant
from experiments.methods.rates import DEFAULT
from experiments.tasks.task import Task
from experiments.training.train import Program, make_mesh, make_program, train


@functools.cache
def load_task(name: str, scored_examples: int | None = None) -> Task:
    """A task by its name, DATASET or DATASET:PATH, whose data are read once."""
    dataset, _, path = name.partition(":")
    return Task(dataset, path or None, scored_examples=scored_examples)


def over_programs(
    program_of: Callable[..., Program], held_out: Task, steps: int, log_every: int, trial_steps: int
) -> Callable[..., Iterator[dict[str, Any]]]:
    """What trains with programs; see `experiments.study.study.Trainer`.

    Learning rates and seeds share a program.

    Args:
      program_of: `(validation, **options of the method) -> program`, called once per combination.
      held_out: The task of trials, whose test set is a validation set.
      steps: The steps of a run.
      log_every: The steps between two logged points of a run.
      trial_steps: The steps of a trial.
    """
    cached = functools.cache(program_of)

    def run(
        setting: Any, seed: int, parameters: Mapping[str, Any], *, validation: bool
    ) -> Iterator[dict[str, Any]]:
        options = {name: value for name, value in parameters.items() if name != "learning_rate"}
        program = cached(validation, **options)
        if "learning_rate" in parameters:
            program = program._replace(learning_rate=parameters["learning_rate"])
        if not validation:
            yield from train(program, seed, steps, log_every)
            return
        *_, end = train(program._replace(task=held_out), seed, trial_steps, trial_steps)
        yield {f"validation_{name}": end[f"test_{name}"] for name in ("loss", "accuracy")}

    return run


def make_trainer(
    config: Any,
    method: str,
    optimizer: str,
    task: Task,
    *,
    steps: int,
    log_every: int,
    trial_steps: int | None = None,
    learning_rate: float | None = None,
    simulated: bool = False,
) -> Callable[..., Iterator[dict[str, Any]]]:
    """What trains a method; see `over_programs`. Nothing is compiled before the first run.

    Args:
      config: The config of the study, with `batch` and `devices`.
      method: The label of the method.
      optimizer: The name of the optimizer.
      task: The task.
      steps: The steps of a run.
      log_every: The steps between two logged points of a run.
      trial_steps: The steps of a trial, which trains without the validation set.
      learning_rate: The learning rate of runs without tuned parameters.
      simulated: Whether one device simulates all workers.

    Raises:
      ExperimentError: If there is no such method, or an option is invalid.
    """
    first, mesh = parse_variant(method), make_mesh(config.devices)
    held_out = task.hold_out(config.batch) if trial_steps else task
    arguments = optimizer, learning_rate or DEFAULT[optimizer], config.batch, mesh

    @functools.cache
    def program_of(variant: Variant) -> Program:
        return make_program(task, variant, *arguments, simulated=simulated)

    program_of(first)
    return over_programs(
        lambda validation, **options: program_of(first.tuned(**options)),
        held_out,
        steps,
        log_every,
        trial_steps or steps,
    )
