"""Trains with methods for sparse leaves, with capacities that are measured before."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from experiments.cli.choices import select
from experiments.cli.errors import ExperimentError
from experiments.methods.sparse import (
    SPARSE_METHODS,
    SparseVariant,
    path_of,
)
from experiments.tasks.losses import CROSS_ENTROPY, LOSSES
from experiments.tasks.task import Task
from experiments.training import codec_cost, densities
from experiments.training.densities import LeafDensity
from experiments.training.diagnostics import RECORDED_MAXIMA
from experiments.training.optimizers import OPTIMIZER_TITLES
from experiments.training.traffic import count_bytes
from experiments.training.train import Program, make_mesh, make_program
from experiments.training.trainer import over_programs

SCORED_EXAMPLES = 5000  # Training examples; the score of all takes longer than training.


class Comparison(NamedTuple):
    """The task and the methods of a config.

    Attributes:
      task: The task.
      held_out: The task whose test set is a validation set.
      mesh: The workers.
      leaves: The density of every leaf.
      gradients: The gradients of the sparse leaves in one batch, `[workers, ...]`, by path.
      programs: The program of every method, by name, for the reported runs.
    """

    task: Task
    held_out: Task
    mesh: Mesh
    leaves: list[LeafDensity]
    gradients: dict[str, jax.Array]
    programs: dict[str, Program]


def _make_task(config: Any) -> Task:
    if config.vocabulary is not None and config.dataset != "words":
        raise ExperimentError("--vocabulary is only for --dataset words.")
    options = {} if config.vocabulary is None else {"vocabulary": config.vocabulary}
    return Task(config.dataset, config.data, scored_examples=SCORED_EXAMPLES, **options)


def _calibrate(
    config: Any, task: Task, workers: int
) -> tuple[list[LeafDensity], dict[str, jax.Array]]:
    """The density of every leaf, and the gradients of the sparse leaves in the last batch, by path.

    The batches are the first of the first trial's seed, which is not among the reported seeds.
    """
    params, batches = task.first_weights(config.seeds), task.batches(config.seeds, config.batch)
    first = [*itertools.islice(batches, config.calibration_batches)]
    leaves = densities.measure_densities(task, workers, params, first)
    sparse = {leaf.leaf for leaf in leaves if leaf.is_sparse}
    gradients = densities.make_gradients(task, workers)(params, first[-1])
    by_path = {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(gradients)}
    return leaves, {path: by_path[path] for path in by_path if path in sparse}


def _make_program(
    config: Any, task: Task, variant: SparseVariant, mesh: Mesh, **options: bool
) -> Program:
    """The program of a method; runs replace its learning rate."""
    arguments = config.optimizer, config.learning_rates[0], config.batch, mesh
    return make_program(task, variant, *arguments, simulated=True, **options)


@functools.lru_cache(maxsize=1)
def prepare(config: Any) -> Comparison:
    """Measures the densities, and builds the programs.

    Raises:
      ExperimentError: If an option is invalid.
    """
    methods = select(config.methods, [*SPARSE_METHODS], "--methods")
    task, mesh = _make_task(config), make_mesh(config.devices)
    held_out = task.hold_out(config.batch)
    leaves, gradients = _calibrate(config, task, mesh.size)
    capacities = {leaf.leaf: leaf.capacity for leaf in leaves if leaf.is_sparse}
    programs = {
        method: _make_program(config, task, SparseVariant(method, capacities), mesh)
        for method in methods
    }
    return Comparison(task, held_out, mesh, leaves, gradients, programs)


def settings(config: Any) -> list[dict[str, str]]:
    """One setting per method."""
    return [{"method": method} for method in prepare(config).programs]


def grid(config: Any, setting: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The learning rates, and the options of the method that are tuned."""
    rates = tuple(sorted(set(config.learning_rates)))
    return {"learning_rate": (rates,), **SPARSE_METHODS[setting["method"]].grid}


def facts(config: Any) -> Iterator[dict[str, Any]]:
    """The density of every leaf; the bytes of every method, and the times of its codec."""
    comparison = prepare(config)
    mesh, gradients = comparison.mesh, comparison.gradients
    for leaf in comparison.leaves:
        yield {"about": "density", **leaf._asdict()}
    for method, program in comparison.programs.items():
        variant = program.variant
        times = codec_cost.time_codec(variant, gradients, config.repetitions)
        yield {
            "about": "sparse",
            "method": method,
            "workers": mesh.size,
            "sparse_bytes": count_bytes(variant, gradients, mesh),
            "step_bytes": program.account.bytes_per_worker,
            "encode_milliseconds": 1e3 * times.encode if times else math.nan,
            "decode_milliseconds": 1e3 * times.decode if times else math.nan,
        }


def make_trainer(
    config: Any, setting: Mapping[str, Any]
) -> Callable[..., Iterator[dict[str, Any]]]:
    """What trains a method; see `experiments.study.study.Trainer`."""
    comparison = prepare(config)
    untuned = comparison.programs[setting["method"]]

    def program_of(validation: bool, **options: Any) -> Program:
        if not (options or validation):
            return untuned
        # Diagnostics cost more than the step itself, and only the reported runs need them.
        variant, more = untuned.variant.tuned(**options), {"with_diagnostics": not validation}
        return _make_program(config, comparison.task, variant, comparison.mesh, **more)

    lengths = config.steps, config.log_every, config.steps
    return over_programs(program_of, comparison.held_out, *lengths)


def describe(config: Any, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Paragraphs of the README: the setup, the densities, the methods, and the columns.

    Args:
      config: The config.
      rows: The rows of the record.
    """
    costs = [row for row in rows if row.get("about") == "sparse"]
    leaves = [LeafDensity.of(row) for row in rows if row.get("about") == "density"]
    maxima = [(name.replace("_", " "), what) for name, what in RECORDED_MAXIMA.items()]
    workers, loss = costs[0]["workers"], LOSSES.get(config.dataset, CROSS_ENTROPY).name
    setup = (
        f"{config.dataset}, {workers} simulated workers, {config.steps} steps of {config.batch} "
        f"examples, {OPTIMIZER_TITLES[config.optimizer]}; all methods have the same weights and "
        "batches per seed. Every method tunes its learning rate, from "
        f"{', '.join(f'{rate:g}' for rate in config.learning_rates)}, and options that do not "
        "change its bytes, if it has any. A trial is scored on a held-out fifth of the training "
        "set; the reported seeds are trained on the whole training set. One small model, one small "
        "dataset, the same number of steps for all methods. One device simulates all workers, so "
        "no step times are measured: bytes are those of the program for all workers, and times are "
        "those of the codec on one device."
    )
    measured = (
        "Nonzero rows of each gradient, the maximum over "
        f"{config.calibration_batches} batches of seed {config.seeds}: `worker` of one worker, "
        "`union` of any worker, and `shard` of the same in the rows of one server, which has one "
        f"of every {workers} rows; the fullest server is listed. {densities.describe(leaves)} "
        f"`mean` sends all other leaves in the same step. {densities.predict(leaves, workers)}"
    )
    legend = "\n".join(
        f"- `{row['method']}`: {SPARSE_METHODS[row['method']].sends}"
        for row in costs
        if row["method"] in SPARSE_METHODS
    )
    notes = (
        f"The held-out loss is the {loss} of the test set. ± is the standard deviation over seeds. "
        "`from dense` is the difference from `mean`, paired by seed, with its 95 % interval; then "
        "the same difference in standard deviations of `mean`. `ratio` is the tuned number of "
        "coordinates in the update, over those of the capacity for one worker. Bytes are read from "
        f"the traced program. {codec_cost.NOTE} Each time is the median of {config.repetitions}, "
        "or `-` if the method has no single codec. `error` is the squared error of the update of "
        "all leaves, relative to the squared norm of the mean, averaged over logged steps and "
        "seeds. The last columns are maxima over steps and seeds, for methods that report them: "
        f"{'; '.join(f'`{name}`, {what}' for name, what in maxima)}."
    )
    return [setup, measured, f"For the sparse leaves, each worker sends:\n\n{legend}", notes]
