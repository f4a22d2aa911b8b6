"""How does one method train one network? One run, with a line per logged step."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
from rich.console import Console

from experiments import cluster
from experiments.methods import DEFAULT_RATES, SURVEYED, parse_method
from experiments.studies.survey import CURVES, TABLE
from experiments.study import run
from experiments.study.claims import Results
from experiments.study.record import make_row, new_record
from experiments.study.run import Command, Study
from experiments.tasks.task import Task
from experiments.trainer import make_mesh, make_program, train

DIVERGED = 2  # Times the loss of the first weights.


@dataclasses.dataclass(frozen=True)
class Train:
    """How does one method train one network?

    Command: `python -m experiments train --method global_qsgd:8`.

    Expected time: ten seconds for digits on two CPU cores.
    """

    method: str = "global_qsgd"
    """the method, e.g. mean, qsgd:4 or two_stage; the error for an unknown method lists all"""
    dataset: str = "digits"
    """digits, glyphs, text or words"""
    data: str | None = None
    """a plain-text file of text or words"""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """sgd (momentum 0.9) or adam"""
    learning_rate: float | None = None
    """constant learning rate (default: the survey's choice for the method with sgd on digits)"""
    steps: int = 200
    """training steps"""
    batch: int = 64
    """examples per step, over all workers"""
    seed: int = 0
    """seed of weights, batches and rounding"""
    log_every: int = 20
    """steps between two logged losses"""
    devices: int | None = None
    """number of workers (default: the number in XLA_FLAGS, or 8)"""
    distributed: bool = False
    """join the processes that `jaxcomm.launch`, Slurm, Open MPI, Kubernetes or a TPU pod started;
    the workers are the devices of all processes"""
    start_timeout: float = 300.0
    """seconds within which all processes must start"""
    record: str = "none"
    """the record folder is <date>_NAME; none writes no record"""
    records: str = "runs"
    """folder in which the record folder is created"""


def _prose(results: Results) -> Sequence[str]:
    config = results.config
    return (
        f"`{results.lines[0]['method']}` on {config.dataset} with {config.optimizer}, learning "
        f"rate {config.learning_rate:g}, {results.workers} workers, {config.steps} steps of "
        f"{config.batch} examples, seed {config.seed}.",
        run.PROVENANCE,
        run.TABLE,
    )


OF_COMPARISONS = {"p", "loses", "saves", "steps_to_target", "target_bytes_ratio", "reached"}
ONE_RUN = Study(
    "train", Train, lambda config: (), lambda *_: None,
    dataclasses.replace(
        TABLE,
        by=("optimizer", "method"),
        columns=tuple(c for c in TABLE.columns if c.name not in {*OF_COMPARISONS, "task"}),
    ),
    _prose, (CURVES,),
)  # fmt: skip
"""The table, the README and the figure of a record of `train`."""


def main(config: Train) -> int:
    """Runs `python -m experiments train`; returns the exit code."""
    mesh, method = make_mesh(config.devices), parse_method(config.method)
    task, origin, rate = Task(config.dataset, config.data), "--learning-rate", config.learning_rate
    if rate is None:
        rate, origin = DEFAULT_RATES[config.optimizer], f"the default with {config.optimizer}"
        if config.optimizer == "sgd" and method.label in SURVEYED:
            rate = SURVEYED[method.label]
            origin = f"the survey's choice for {method.label} on digits"
        config = dataclasses.replace(config, learning_rate=rate)
    program = make_program(task, method, config.optimizer, rate, config.batch, mesh)
    batch = next(task.batches(config.seed, config.batch))
    first_loss = float(task.loss(task.first_weights(config.seed), batch))
    keys = {"method": method.label, "optimizer": config.optimizer, "seed": config.seed}
    with new_record(config, "train") as record, cluster.reraise_lost_process():
        processes = f", {jax.process_count()} processes" if config.distributed else ""
        print(
            f"{method.label} on {config.dataset}, {config.optimizer} with the learning rate "
            f"{rate:g} ({origin}), {mesh.size} workers on {jax.default_backend()}{processes}",
            flush=True,
        )
        warned = False
        for values in train(program, config.seed, config.steps, config.log_every, mesh):
            record.add([make_row("point" if "step" in values else "run", keys, values)])
            if "step" in values:
                print(
                    f"step {values['step']}: training loss {values['train_loss']:.4f}, sent "
                    f"{values['bytes_sent']:,.0f} bytes per worker",
                    flush=True,
                )
                if not (warned or values["train_loss"] <= DIVERGED * first_loss):
                    warned = True
                    print(
                        f"Warning: the run diverges. The training loss is "
                        f"{values['train_loss']:.3g} after step {values['step']}, and was "
                        f"{first_loss:.3g} before the first. Use a --learning-rate below {rate:g}."
                    )
        results = run.analyze(ONE_RUN, config, record.rows, record.environment)
        print("Traffic of one step:", program.account, sep="\n")
        Console(highlight=False, markup=False).print(ONE_RUN.table.to_rich(results.lines))
        if record.folder:
            run.write(ONE_RUN, results, record.folder)
            print(f"Record: {record.folder}")
        record.finish()
    return 0


TRAIN = Command(Train, main)
