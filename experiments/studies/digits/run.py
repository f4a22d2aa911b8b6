"""Compares methods over optimizers and seeds: a table, a figure and a verdict."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from experiments.cli.configs import Compare
from experiments.cli.progress import Progress
from experiments.methods import expand, parse_variant
from experiments.studies.digits import acceptance
from experiments.studies.digits.report import write_readme
from experiments.studies.digits.table import TABLE
from experiments.studies.survey import run as survey
from experiments.study import figures
from experiments.study.record import NoRecord, Record, open_record
from experiments.tasks.task import Task
from experiments.training.train import Program, make_mesh, make_program, train

REFERENCE_WORKERS = 8
REJECTED = 1


def _is_reference(config: Compare, workers: int) -> bool:
    """Whether the settings are the defaults, except for those of devices and records."""
    machine_options = {name: getattr(config, name) for name in ("devices", "record", "records")}
    return (
        config == dataclasses.replace(Compare(), **machine_options) and workers == REFERENCE_WORKERS
    )


def _make_programs(config: Compare) -> list[Program]:
    """One program per method and optimizer. User errors are raised here, before any run."""
    mesh, task = make_mesh(config.devices), Task(config.dataset)
    variants = [parse_variant(label) for label in config.methods]
    return [
        make_program(
            task, variant, optimizer, config.fixed_learning_rates[optimizer], config.batch, mesh
        )
        for optimizer in config.optimizers
        for variant in variants
    ]


def _run_all(
    config: Compare,
    programs: Sequence[Program],
    record: Record | NoRecord,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Runs and records all programs and seeds; returns the last row of each run."""
    runs = []
    width = max(15, *(len(program.variant.label) + 1 for program in programs))
    for program in programs:
        began = time.perf_counter()
        for seed in range(config.seeds):
            for row in train(program, seed, config.steps, config.log_every):
                record.add(row)
            runs.append(row)
            seconds, began = time.perf_counter() - began, time.perf_counter()
            progress.advance(
                len(runs),
                f"{program.optimizer:5}{program.variant.label:{width}} seed {seed}: training loss "
                f"{row['train_loss']:.4f}, test accuracy {100 * row['test_accuracy']:.1f} %, "
                f"{seconds:.1f} s{'' if seed else ', including compilation'}",
            )
    return runs


def main(config: Compare) -> int:
    """Runs `python -m experiments compare`.

    Returns:
      The exit code: 1 if the acceptance criterion is not met at the default settings.
    """
    if config.learning_rates:
        return survey.main(config)
    config = dataclasses.replace(
        config,
        methods=expand(config.methods),
        optimizers=tuple(dict.fromkeys(config.optimizers)),
    )
    programs = _make_programs(config)
    workers = make_mesh(config.devices).size
    total = len(programs) * config.seeds
    with open_record(config) as record, Progress(total) as progress:
        progress.print(f"{total} runs of {config.steps} steps on {workers} workers")
        runs = _run_all(config, programs, record, progress)
        lines = TABLE.lines(runs)
        verdicts = acceptance.judge(config, lines)
        progress.print(TABLE.to_rich(lines))
        progress.print(acceptance.describe(config, verdicts))
        record.write("table.csv", TABLE.to_csv(lines))
        record.write("README.md", write_readme(config, workers, lines, verdicts))
        if record.folder:
            figures.draw(record.folder)
            progress.print(f"Record: {record.folder}")
        record.finish()
    failed = _is_reference(config, workers) and not acceptance.is_accepted(config, verdicts)
    return REJECTED if failed else 0
