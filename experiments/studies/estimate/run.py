"""Distributed mean estimation: the error of each method on the gradients of a training run."""

import dataclasses
import inspect
import io
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

import jaxcomm
from experiments.cli.configs import Estimate
from experiments.cli.errors import ExperimentError
from experiments.cli.progress import Progress
from experiments.methods import BASELINE, ESTIMATORS, Variant, expand, parse_variant
from experiments.studies.estimate import figure
from experiments.studies.estimate.table import (
    EXACT,
    Row,
    describe_frontier,
    summarize,
    to_csv,
    to_markdown,
    to_table,
)
from experiments.study import figures
from experiments.study.record import describe_command, open_record
from experiments.tasks.task import Task
from experiments.training.train import make_mesh, make_program

GRADIENTS = "gradients.npz"
CAVEAT = (
    "These are gradients of one small network, which fits into one bucket. Methods differ in the "
    "number of coordinates per norm: all in `global_qsgd` and `qsgd`, 256 in `two_stage` and "
    "`mean_float8`. More coordinates per norm give more noise, so other sizes have other errors."
)


def collect_gradients(config: Estimate, task: Task, mesh: Mesh) -> dict[int, np.ndarray]:
    """The gradients of the workers, float32[workers, d], at each step in `config.steps`.

    The gradient at step 1 is that of the initial weights.
    """

    @jax.jit
    def local_gradients(params: Any, batch: Any) -> jax.Array:
        def on_worker(params: Any, batch: Any) -> jax.Array:
            _, gradient = jaxcomm.local_value_and_grad(task.loss)(params, batch)
            return ravel_pytree(gradient)[0][None]

        specs = jaxcomm.state_specs(params), PartitionSpec("data")
        return jax.shard_map(on_worker, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("data"))(
            params, batch
        )

    exact = parse_variant(BASELINE)
    program = make_program(task, exact, "sgd", config.learning_rate, config.batch, mesh)
    params, opt_state = program.start(config.seed)
    batches, gradients = task.batches(config.seed, config.batch), {}
    for number in range(1, max(config.steps) + 1):
        batch = next(batches)
        if number in config.steps:
            gradients[number] = np.asarray(local_gradients(params, batch))
        params, opt_state, _ = program.step(params, opt_state, batch)
    return gradients


def make_estimator(variant: Variant, mesh: Mesh) -> Callable[..., jax.Array]:
    """`(seed, float32[workers, d]) -> float32[d]`: the estimate of the mean by the method."""

    @jax.jit
    def estimate(seed: jax.Array, gradients: jax.Array) -> jax.Array:
        def on_worker(seed: jax.Array, gradient: jax.Array) -> jax.Array:
            aggregator = variant.build(seed)
            return aggregator.update(gradient[0], aggregator.init(gradient[0]))[0]

        specs = PartitionSpec(), PartitionSpec("data")
        return jax.shard_map(on_worker, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(
            seed, gradients
        )

    return estimate


def count_bytes(estimate: Callable[..., jax.Array], shape: tuple[int, int]) -> float:
    """The bytes that a worker sends for one estimate.

    Raises:
      ExperimentError: If the method does not support the number of workers.
    """
    arguments = jax.ShapeDtypeStruct((), np.uint32), jax.ShapeDtypeStruct(shape, np.float32)
    try:
        return jaxcomm.wire.account(estimate, *arguments).bytes_per_worker
    except ValueError as error:
        raise ExperimentError(str(error)) from error


def measure(
    estimate: Callable[..., jax.Array], gradients: np.ndarray, draws: int, first_seed: int
) -> dict[str, float]:
    """Errors relative to the squared norm of the mean, over draws with consecutive seeds.

    `squared_bias` is an unbiased estimate, so it may be below 0.
    """
    mean = gradients.astype(np.float64).mean(axis=0)
    seeds = [np.uint32(first_seed + draw) for draw in range(draws)]
    updates = np.stack([np.asarray(estimate(seed, gradients), np.float64) for seed in seeds])
    scale = np.vdot(mean, mean)
    errors = np.square(updates - mean).sum(axis=1) / scale
    average = updates.mean(axis=0)
    variance = np.square(updates - average).sum() / scale / max(1, draws - 1)
    return {
        "error": float(errors.mean()),
        "error_sd": float(errors.std(ddof=1)) if draws > 1 else float("nan"),
        "squared_bias": float(np.square(average - mean).sum() / scale - variance / draws),
    }


def _write_readme(config: Estimate, shape: tuple[int, int], rows: Sequence[Row]) -> str:
    question = (inspect.getdoc(config) or "").splitlines()[0]
    workers, size = shape
    steps = ", ".join(map(str, config.steps))
    return (
        f"# {question}\n\n"
        f"{config.dataset}, {workers} workers, {size:,} coordinates: the gradients of step {steps} "
        f"of one run of SGD with momentum and the exact mean, {config.batch} examples per step, "
        f"learning rate {config.learning_rate}; {config.draws} draws of the rounding per step.\n\n"
        f"Command: `{describe_command()}`. Versions and machine are in `environment.txt`, every "
        f"setting in `config.json`, each step's errors in `metrics.jsonl`, the workers' gradients "
        f"at step {max(config.steps)} in `{GRADIENTS}`; the others follow from the seed.\n\n"
        f"{to_markdown(rows)}\n"
        "The error is E‖G - mean‖² / ‖mean‖² of an estimate G, averaged over draws and then over "
        "steps; the next column is its range over steps. The share of bias is ‖E G - mean‖² over "
        "the error, the part that an average over more draws would not reduce: about 0 for "
        "unbiased rounding, 1 without random numbers. Bytes are those that a worker sends, as "
        "`jaxcomm.wire.account` counts them. Bits are per coordinate; a float32 all-reduce sends "
        f"{64 * (workers - 1) / workers:g}, and the ratio is to that. Errors up to {EXACT:.0e} are "
        "those of a float32 sum in another order. The estimate 0, which sends nothing, has an "
        "error of 1.\n\n"
        f"{describe_frontier(rows)} {CAVEAT}\n\n"
        f"![Error against bits per coordinate]({figure.NAME})\n"
    )


def _save_gradients(gradients: np.ndarray, step: int) -> bytes:
    content = io.BytesIO()
    np.savez_compressed(content, gradients=gradients, step=step)
    return content.getvalue()


def main(config: Estimate) -> int:
    """Runs `python -m experiments estimate`; returns the exit code."""
    config = dataclasses.replace(
        config, methods=expand(config.methods, ESTIMATORS), steps=tuple(sorted(set(config.steps)))
    )
    variants = [parse_variant(label) for label in config.methods]
    mesh = make_mesh(config.devices)
    if mesh.size < 2:
        raise ExperimentError("an estimate requires at least 2 workers, got --devices 1.")
    # The warning is about few levels, which are intended here.
    warnings.filterwarnings("ignore", "`bits`=", UserWarning)
    task = Task(config.dataset)
    shape = mesh.size, sum(leaf.size for leaf in jax.tree.leaves(task.first_weights(config.seed)))
    full = count_bytes(make_estimator(parse_variant(BASELINE), mesh), shape)
    estimators = {variant.label: make_estimator(variant, mesh) for variant in variants}
    sent = {label: count_bytes(estimate, shape) for label, estimate in estimators.items()}
    gradients = collect_gradients(config, task, mesh)
    estimates = []
    with open_record(config) as record, Progress(len(estimators)) as progress:
        progress.print(
            f"{len(estimators)} methods; gradients of {shape[0]} workers at {len(gradients)} steps"
        )
        record.write_bytes(GRADIENTS, _save_gradients(gradients[max(gradients)], max(gradients)))
        for done, (label, estimate) in enumerate(estimators.items(), 1):
            began = time.perf_counter()
            cost = {
                "bytes_per_worker": sent[label],
                "bits_per_coordinate": 8 * sent[label] / shape[1],
                "bytes_ratio": sent[label] / full,
            }
            for position, (step, of_step) in enumerate(gradients.items()):
                first_seed = config.seed + position * config.draws
                row = {"kind": "estimate", "method": label, "step": step, "draws": config.draws}
                row |= measure(estimate, of_step, config.draws, first_seed) | cost
                record.add(row)
                estimates.append(row)
            seconds, latest = time.perf_counter() - began, summarize(estimates)[-1]
            progress.advance(
                done,
                f"{label:34} error {latest.error:.2e} at {latest.bits_per_coordinate:5.2f} bits "
                f"per coordinate, {seconds:.1f} s",
            )
        rows = summarize(estimates)
        progress.print(to_table(rows))
        progress.print(describe_frontier(rows))
        record.write("table.csv", to_csv(rows))
        record.write("README.md", _write_readme(config, shape, rows))
        if record.folder:
            figures.draw(record.folder)
            progress.print(f"Record: {record.folder}")
        record.finish()
    return 0
