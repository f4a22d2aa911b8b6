"""The command `train`: one method trains one network, with a line per logged step."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from experiments.cli.configs import Train
from experiments.cli.progress import Progress
from experiments.methods import make_variant
from experiments.methods.rates import first_rate
from experiments.studies import digits
from experiments.study import command, readme
from experiments.study.claims import Results
from experiments.study.columns import Table
from experiments.study.record import describe_environment, open_record
from experiments.study.study import Study
from experiments.study.tidy import make_row
from experiments.tasks.task import Task
from experiments.training import cluster
from experiments.training.finite import FiniteSteps
from experiments.training.train import make_mesh, make_program, train

DIVERGED = 2  # Times the loss of the first weights.
OF_COMPARISONS = ("loss_ratio", "paired", "higher_in", "accuracy_difference", "bytes_ratio")
TABLE = Table(
    digits.TABLE.by,
    tuple(column for column in digits.TABLE.columns if column.name not in OF_COMPARISONS),
)


def _prose(results: Results) -> Sequence[str]:
    config = results.config
    return (
        f"`{results.lines[0]['method']}` on {config.dataset} with {config.optimizer}, learning "
        f"rate {config.learning_rate:g}, {results.workers} workers, {config.steps} steps of "
        f"{config.batch} examples, seed {config.seed}.",
        readme.PROVENANCE,
        readme.TABLE,
    )


STUDY = Study("train", Train, lambda config: (), lambda *_: None, TABLE, _prose, (digits.FIGURE,))
"""The table, the README and the figure of a record of `train`."""


def _warning(values: Mapping[str, Any], first_loss: float, rate: float) -> str:
    return (
        f"Warning: the run diverges. The training loss is {values['train_loss']:.3g} after step "
        f"{values['step']}, and was {first_loss:.3g} before the first. Use a --learning-rate below "
        f"{rate:g}."
    )


def main(config: Train) -> int:
    """Runs `python -m experiments train`; returns the exit code."""
    mesh, variant = make_mesh(config.devices), make_variant(config.method, config.bits)
    task, origin = Task(config.dataset, config.data), "--learning-rate"
    if config.learning_rate is None:
        rate, origin = first_rate(variant.label, config.optimizer)
        config = dataclasses.replace(config, learning_rate=rate)
    rate = config.learning_rate
    program = make_program(task, variant, config.optimizer, rate, config.batch, mesh)
    batch = next(task.batches(config.seed, config.batch))
    first_loss = float(task.loss(task.first_weights(config.seed), batch))
    keys = {"method": variant.label, "optimizer": config.optimizer, "seed": config.seed}
    rows, warned = [], False
    with (
        open_record(config, study=STUDY.name) as record,
        Progress(config.steps) as progress,
        cluster.reraise_lost_process(),
    ):
        processes = f", {jax.process_count()} processes" if config.distributed else ""
        progress.print(
            f"{variant.label} on {config.dataset}, {config.optimizer} with the learning rate "
            f"{rate:g} ({origin}), {mesh.size} workers on {jax.default_backend()}{processes}"
        )
        finite = FiniteSteps(task.loss, mesh)
        for values in train(program, config.seed, config.steps, config.log_every, finite):
            rows.append(make_row("point" if "step" in values else "run", keys, values))
            record.add(rows[-1])
            if "step" in values:
                progress.advance(
                    values["step"],
                    f"step {values['step']}: training loss {values['train_loss']:.4f}, sent "
                    f"{values['bytes_sent']:,.0f} bytes per worker",
                )
                if not (warned or values["train_loss"] <= DIVERGED * first_loss):
                    progress.print(_warning(values, first_loss, rate))
                    warned = True
        results = command.analyze(STUDY, config, rows, describe_environment())
        progress.print("Traffic of one step:")
        progress.print(program.account)
        progress.print(TABLE.to_rich(results.lines))
        command.write(STUDY, results, record)
        if record.folder:
            progress.print(f"Record: {record.folder}")
        record.finish()
    return 0
