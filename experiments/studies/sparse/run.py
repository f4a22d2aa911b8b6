"""Compares methods for sparse updates: bytes, time and held-out loss after the same steps."""

import dataclasses
import functools
import itertools
import math
import time
from typing import Any

import jax

from experiments.cli.configs import Sparse
from experiments.cli.errors import ExperimentError
from experiments.cli.progress import Progress
from experiments.methods.sparse import SparseVariant, make_sparse_variants, path_of
from experiments.studies.sparse import density
from experiments.studies.sparse.cost import count_sparse_bytes, time_codec
from experiments.studies.sparse.density import LeafDensity, make_gradients, measure_densities
from experiments.studies.sparse.findings import describe_findings
from experiments.studies.sparse.report import write_readme
from experiments.studies.sparse.table import summarize, to_csv, to_table
from experiments.studies.survey.run import run_seeds, tune
from experiments.study import figures
from experiments.study.record import open_record
from experiments.study.tuning import choose, mean_losses
from experiments.tasks.task import Task
from experiments.training.train import Program, make_mesh, make_program

SCORED_EXAMPLES = 5000  # Training examples; the score of all takes longer than training.


def _make_task(config: Sparse) -> Task:
    if config.vocabulary is not None and config.dataset != "words":
        raise ExperimentError("--vocabulary is only for --dataset words.")
    options = {} if config.vocabulary is None else {"vocabulary": config.vocabulary}
    return Task(config.dataset, config.data, scored_examples=SCORED_EXAMPLES, **options)


def _calibrate(
    config: Sparse, task: Task, workers: int
) -> tuple[list[LeafDensity], dict[str, jax.Array]]:
    """The density of every leaf, and the gradients of the sparse leaves in the last batch, by path.

    The batches are the first of a tuning seed, which is not among the reported seeds.
    """
    params = task.first_weights(config.seeds)
    batches = [
        *itertools.islice(task.batches(config.seeds, config.batch), config.calibration_batches)
    ]
    leaves = measure_densities(task, workers, params, batches)
    sparse = {leaf.leaf for leaf in leaves if leaf.is_sparse}
    gradients = make_gradients(task, workers)(params, batches[-1])
    by_path = {
        path_of(path): gradient for path, gradient in jax.tree_util.tree_leaves_with_path(gradients)
    }
    return leaves, {path: by_path[path] for path in by_path if path in sparse}


def _measure_cost(
    config: Sparse, variant: SparseVariant, program: Program, gradients: dict[str, jax.Array]
) -> dict[str, Any]:
    """A row of kind `"sparse"`: bytes of the sparse leaves and of the step, and codec times."""
    shapes = {path: gradient.shape[1:] for path, gradient in gradients.items()}
    mesh, times = make_mesh(config.devices), time_codec(variant, gradients, config.repetitions)
    return {
        "kind": "sparse",
        "method": variant.label,
        "workers": mesh.size,
        "sparse_bytes": count_sparse_bytes(variant, shapes, mesh),
        "step_bytes": program.account.bytes_per_worker,
        "encode_milliseconds": 1e3 * times.encode if times else math.nan,
        "decode_milliseconds": 1e3 * times.decode if times else math.nan,
    }


def main(config: Sparse) -> int:
    """Runs `python -m experiments sparse`; returns the exit code."""
    labels = [variant.label for variant in make_sparse_variants(config.methods, {})]
    config = dataclasses.replace(config, methods=tuple(labels))
    task, mesh = _make_task(config), make_mesh(config.devices)
    held_out = task.hold_out()
    if config.batch > len(held_out.dataset.train_inputs):
        raise ExperimentError(
            f"--batch {config.batch} exceeds the {len(held_out.dataset.train_inputs)} training "
            "examples that remain without the validation set."
        )
    leaves, gradients = _calibrate(config, task, mesh.size)
    capacities = {leaf.leaf: leaf.capacity for leaf in leaves if leaf.is_sparse}
    rates = config.learning_rates or ()
    make = functools.partial(
        make_program,
        optimizer=config.optimizer,
        learning_rate=rates[0],
        batch=config.batch,
        mesh=mesh,
        simulated=True,
    )
    variants = make_sparse_variants(labels, capacities)
    programs = [make(task, variant) for variant in variants]
    costs = [
        _measure_cost(config, variant, program, gradients)
        for variant, program in zip(variants, programs, strict=True)
    ]
    with open_record(config) as record, Progress(len(programs)) as progress:
        progress.print(
            f"{len(programs)} methods at {len(set(rates))} learning rates, {config.steps} steps, "
            f"{mesh.size} simulated workers"
        )
        progress.print(density.to_table(leaves))
        for row in [*({"kind": "density", **leaf._asdict()} for leaf in leaves), *costs]:
            record.add(row)
        runs: list[dict[str, Any]] = []
        tuning: list[dict[str, Any]] = []
        for done, program in enumerate(programs, 1):
            began = time.perf_counter()
            # Diagnostics cost more than the step itself, and only the reported runs need them.
            without_diagnostics = make(held_out, program.variant, with_diagnostics=False)
            trials = tune(config, without_diagnostics, held_out, record)
            tuning += trials
            runs += run_seeds(config, program, choose(mean_losses(trials)), record)
            latest = summarize(costs, runs, tuning)[-1]
            progress.advance(
                done,
                f"{latest.method:{max(map(len, labels))}} rate {latest.learning_rate:<6g} held-out "
                f"loss {latest.test_loss:.3f}, {latest.sparse_bytes:,.0f} sparse bytes per "
                f"worker and step, {time.perf_counter() - began:.0f} s",
            )
        rows = summarize(costs, runs, tuning)
        progress.print(to_table(rows))
        progress.print(describe_findings(rows, leaves))
        record.write("table.csv", to_csv(rows))
        record.write("README.md", write_readme(config, task.loss_of.name, leaves, rows))
        if record.folder:
            figures.draw(record.folder)
            progress.print(f"Record: {record.folder}")
        record.finish()
    return 0
