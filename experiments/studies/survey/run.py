"""Compares all methods at tuned learning rates: their losses and savings against the mean."""

import dataclasses
import time
import warnings
from typing import Any

from experiments.cli.configs import Compare
from experiments.cli.progress import Progress
from experiments.methods import expand, parse_variant
from experiments.studies.survey.report import describe_findings, write_readme
from experiments.studies.survey.table import summarize, to_csv, to_table
from experiments.study import figures
from experiments.study.record import NoRecord, Record, open_record
from experiments.study.tuning import choose, mean_losses
from experiments.tasks.task import Task
from experiments.training.train import Program, make_mesh, make_program, train


def _make_programs(config: Compare, task: Task) -> list[Program]:
    """One program per method and optimizer. User errors are raised here, before any run."""
    mesh, rates = make_mesh(config.devices), config.learning_rates or ()
    variants = [parse_variant(label) for label in config.methods]
    return [
        make_program(task, variant, optimizer, rates[0], config.batch, mesh, simulated=True)
        for optimizer in config.optimizers
        for variant in variants
    ]


def tune(
    config: Compare, program: Program, held_out: Task, record: Record | NoRecord
) -> list[dict[str, Any]]:
    """Trains at each rate on the training set without the validation set; returns the trials.

    Args:
      config: The grid, and the number of additional seeds.
      program: The program, shared by all rates.
      held_out: The task whose test set is a validation set.
      record: The record for the trials, of kind `"tuning"`.
    """
    trials = []
    for rate in sorted(set(config.learning_rates or ())):
        tried = program._replace(task=held_out, learning_rate=rate)
        for seed in range(config.seeds, config.seeds + config.tuning_seeds):
            *_, run = train(tried, seed, config.steps, config.steps)
            trial = {
                "kind": "tuning",
                **{name: run[name] for name in ("method", "optimizer", "seed", "learning_rate")},
                "validation_loss": run["test_loss"],
                "validation_accuracy": run["test_accuracy"],
            }
            record.add(trial)
            trials.append(trial)
    return trials


def run_seeds(
    config: Compare, program: Program, learning_rate: float, record: Record | NoRecord
) -> list[dict[str, Any]]:
    """Trains and records the reported seeds; returns the last row of each."""
    runs, tuned_program = [], program._replace(learning_rate=learning_rate)
    for seed in range(config.seeds):
        for row in train(tuned_program, seed, config.steps, config.log_every):
            record.add(row)
        runs.append(row)
    return runs


def main(config: Compare) -> int:
    """Runs `python -m experiments survey`; returns the exit code."""
    config = dataclasses.replace(
        config,
        methods=expand(config.methods),
        optimizers=tuple(dict.fromkeys(config.optimizers)),
    )
    # The warning is about few levels, which are intended here.
    warnings.filterwarnings("ignore", "`bits`=", UserWarning)
    task = Task(config.dataset)
    held_out = task.hold_out(config.batch)
    programs, workers = _make_programs(config, task), make_mesh(config.devices).size
    width = max(len(program.variant.label) for program in programs)
    with open_record(config) as record, Progress(len(programs)) as progress:
        progress.print(
            f"{len(programs)} methods at {len(set(config.learning_rates or ()))} learning rates, "
            f"{config.steps} steps, {workers} simulated workers"
        )
        runs: list[dict[str, Any]] = []
        tuning: list[dict[str, Any]] = []
        for done, program in enumerate(programs, 1):
            began = time.perf_counter()
            trials = tune(config, program, held_out, record)
            tuning += trials
            runs += run_seeds(config, program, choose(mean_losses(trials)), record)
            latest = summarize(runs, tuning)[-1]
            progress.advance(
                done,
                f"{program.optimizer:5}{latest.method:{width}} rate {latest.learning_rate:<7g} "
                f"test loss {latest.test_loss:.3f}, {latest.loss_ratio:.2f} of mean's for "
                f"{latest.bytes_ratio:.3f} of its bytes, {time.perf_counter() - began:.0f} s",
            )
        rows = summarize(runs, tuning)
        progress.print(to_table(rows))
        progress.print(describe_findings(rows))
        record.write("table.csv", to_csv(rows))
        record.write("README.md", write_readme(config, workers, rows))
        if record.folder:
            figures.draw(record.folder)
            progress.print(f"Record: {record.folder}")
        record.finish()
    return 0
