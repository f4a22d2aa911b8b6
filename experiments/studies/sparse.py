"""How many bytes does S2 Reducer save on sparse updates, compared with other methods?"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.errors import ExperimentError, select
from experiments.sparse_methods import (
    MARGIN,
    MAX_DENSITY,
    SPARSE_METHODS,
    Capacity,
    LeafDensity,
    measure_densities,
    sparse_method,
)
from experiments.study import table as groups
from experiments.study.claims import Claim, Results, is_at_most, is_no_worse
from experiments.study.plot import Axis, Points
from experiments.study.record import Row, of_kind
from experiments.study.run import (
    CLAIMS,
    FIGURES,
    PROVENANCE,
    TABLE,
    TUNING,
    Options,
    Setting,
    Study,
    Trainer,
)
from experiments.study.table import (
    SEEDS,
    Column,
    Group,
    Line,
    Table,
    compared_with,
    fact_table,
    first,
    key,
    only_in_csv,
    over_reference,
)
from experiments.study.tuning import Grid
from experiments.tasks.task import Task
from experiments.trainer import (
    count_bytes,
    make_mesh,
    make_program,
    over_programs,
)


@dataclasses.dataclass(frozen=True)
class Sparse(Options):
    """How many bytes does S2 Reducer save on sparse updates, compared with other methods?

    Question: a language model with an embedding of 5,000 words on the text of Python's `help()`; 8
    workers, five seeds. How dense is the gradient of each leaf? How many bytes of the sparse leaves
    does each method send, and which held-out loss does it reach after the same number of steps?
    Does S2 Reducer save the 81 % that its paper states, at the loss of the dense mean?

    Command: `python -m experiments sparse`, or `make sparse`; 25 minutes on two idle CPU cores.

    Number: the bytes of the sparse leaves over those of the sparse all-gather and of the dense
    all-reduce, and the difference in held-out loss, paired by seed.
    """

    data: str | None = None
    """a plain-text file instead of the text of help()"""
    vocabulary: int = 5000
    """the words of the embedding"""
    methods: tuple[str, ...] = ("all",)
    """methods to compare, or all"""
    learning_rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    """learning rates of the first grid"""
    trials: int = 6
    """points of its grid that each method tries"""
    seeds: int = 5
    """number of seeds"""
    steps: int = 150
    """training steps per run"""
    batch: int = 256
    """examples per step, over all workers"""
    calibration_batches: int = 20
    """batches that measure the densities"""
    devices: int | None = None
    """number of workers (default: the number in XLA_FLAGS, or 8)"""


SCORED_EXAMPLES = 5000  # Training examples; the score of all takes longer than training.
STATED_PART = 0.19  # Of the bytes, which S2 Reducer sends according to its paper.


class Comparison(NamedTuple):
    """The task and the methods of a config.

    Attributes:
      held_out: The task whose test set is a validation set.
      mesh: The workers.
      leaves: The density of every leaf.
      capacities: The capacity for each sparse leaf, by path.
      methods: The names of the methods.
      program: `(method, **options) -> program`.
    """

    held_out: Task
    mesh: Mesh
    leaves: list[LeafDensity]
    capacities: dict[str, Capacity]
    methods: list[str]
    program: Callable


@functools.lru_cache(maxsize=1)
def prepare(config: Sparse) -> Comparison:
    """Measures the densities, in the first batches of a trial's seed, and builds the programs.

    Raises:
      ExperimentError: If an option is invalid.
    """
    methods = select(config.methods, [*SPARSE_METHODS], "--methods")
    task = Task("words", config.data, scored_examples=SCORED_EXAMPLES, vocabulary=config.vocabulary)
    held_out, mesh = task.hold_out(config.batch), make_mesh(config.devices)
    if config.batch % mesh.size:
        raise ExperimentError(f"--batch {config.batch} is not divisible by {mesh.size} workers.")
    params, batches = task.first_weights(config.seeds), task.batches(config.seeds, config.batch)
    calibration = [*itertools.islice(batches, config.calibration_batches)]
    leaves = measure_densities(task, mesh.size, params, calibration)
    capacities = {leaf.leaf: leaf.capacity for leaf in leaves if leaf.is_sparse}
    if not capacities:
        raise ExperimentError(
            "no leaf is sparse: more than half of the rows of each leaf are nonzero. Use a smaller "
            "--batch or a larger --vocabulary."
        )

    def program(method, **options):
        return make_program(
            task, sparse_method(method, capacities).tuned(**options), "adagrad",
            config.learning_rates[0], config.batch, mesh,
            simulated=True, with_errors=False,
        )  # fmt: skip

    return Comparison(held_out, mesh, leaves, capacities, methods, program)


def grid(config: Sparse, setting: Setting) -> Grid:
    """The learning rates, and the options of the method that are tuned."""
    return {"learning_rate": (config.learning_rates,), **SPARSE_METHODS[setting["method"]].grid}


def make_trainer(config: Sparse, setting: Setting) -> Trainer:
    """What trains a method; see `experiments.study.run.Trainer`."""
    comparison, steps = prepare(config), config.steps
    program = functools.partial(comparison.program, setting["method"])
    return over_programs(program, comparison.held_out, steps, log_every=steps, trial_steps=steps)


def facts(config: Sparse, known: Sequence[Row]) -> Iterator[Row]:
    """The density of every leaf, and the bytes of every method, that are not known."""
    yield from (row for row in _facts(config) if {"kind": "fact", **row} not in known)


def _facts(config: Sparse) -> Iterator[Row]:
    comparison, gradients = prepare(config), {}
    workers = comparison.mesh.size
    for leaf in comparison.leaves:
        yield {"about": "density", **leaf._asdict()}
        if leaf.is_sparse:
            gradients[leaf.leaf] = jax.ShapeDtypeStruct((workers, *leaf.shape), np.float32)
    for method in comparison.methods:
        built = sparse_method(method, comparison.capacities)
        sent = count_bytes(built, gradients, comparison.mesh)
        yield {"about": "sparse", "method": method, "workers": workers, "sparse_bytes": sent}


def deviations(group: Group) -> float:
    """The difference of the mean loss from the reference, in its standard deviations over seeds."""
    if group.reference is None:
        return math.nan
    loss = groups.spread("test_loss")
    center, deviation = loss(group.reference)
    return (loss(group).mean - center) / (deviation or math.nan)


SENT = first("sparse_bytes", "fact")
MEASURED = Table(
    by=("method",),
    columns=(
        key("method"),
        SEEDS,
        Column("learning rate", groups.tuned("learning_rate"), name="learning_rate"),
        Column("ratio", groups.tuned("ratio")),
        Column("held-out loss", groups.spread("test_loss"), ".3f", "test_loss"),
        Column("from dense", groups.difference("test_loss"), "+z.3f", "paired_difference"),
        Column("from dense, in its sd", deviations, "+z.2f", "difference"),
        Column("sparse bytes/worker/step", SENT, ",.0f", "sparse_bytes"),
        Column("of dense", over_reference(SENT), ".4f", "dense_ratio"),
        Column("of all-gather", compared_with(over_reference(SENT), method="all_gather"), ".3f",
               "all_gather_ratio"),
        only_in_csv("is_within", lambda group: deviations(group) <= 1),
    ),
    reference={"method": "mean"},
)  # fmt: skip

S2 = {"method": ("s2_mean_0.25", "s2_mean_1", "s2_median_1", "s2_peel", "s2_peel_8_bits")}
STATED = (
    Claim("S2 Reducer sends at least 81 % less for sparse leaves than the sparse all-gather.",
          is_at_most("all_gather_ratio", STATED_PART, methods=S2)),
    Claim("S2 Reducer sends at least 81 % less for sparse leaves than the dense all-reduce.",
          is_at_most("dense_ratio", STATED_PART, methods=S2)),
    Claim("The held-out loss is at most 0.5 % above that of the dense mean.",
          is_no_worse("test_loss", 1.005, log=True)),
)  # fmt: skip


def mark(line: Line) -> dict[str, Any]:
    families = dict.fromkeys(S2["method"], ("S2 Reducer", "tab:blue"))
    families |= dict.fromkeys(("mean", "mean_bfloat16", "all_gather"), ("reference", "black"))
    family, color = families.get(line["method"], ("other", "tab:orange"))
    marker, where = ("o", "") if line["is_within"] else ("X", ", above the band")
    return {"marker": marker, "color": color, "ecolor": (color, 0.35), "label": family + where}


def mark_reference(axes: Any, results: Results, _: Setting) -> None:
    """Marks the loss of the dense mean by a line, and its standard deviation by a band."""
    for line in results.lines:
        if line.group.is_reference:
            center, deviation = line["test_loss"]
            axes.axhline(center, color="black", linestyle=":", linewidth=1, alpha=0.5)
            axes.axhspan(center - deviation, center + deviation, color="black", alpha=0.07,
                         linewidth=0)  # fmt: skip


def predict(sparse: Sequence[LeafDensity], workers: int) -> str:
    """The predicted bytes of a table with one cell per coordinate of the union."""
    sizes = [math.prod(leaf.shape) for leaf in sparse]
    worker, union, *_ = np.average([leaf.capacity for leaf in sparse], axis=0, weights=sizes)
    text = (
        "[The paper of S2 Reducer](https://arxiv.org/abs/2110.02140) states that it sends 81 % "
        f"less. The union of {workers} workers is {union / worker:.2f} times as dense as the "
        f"gradient of one worker. The all-gather passes on {workers - 1} payloads, and a sum sends "
        f"its table {2 * (workers - 1) / workers:.2f} times."
    )
    # A sum sends its table 2 (n-1)/n times; an all-gather sends n-1 payloads of values.
    for name, ratio in (
        ("the sparse all-gather", 2 * union / (workers * worker)),
        ("the dense all-reduce", union),
    ):
        text += (
            f" Predicted: one cell per coordinate of the union costs {ratio:.2f} times {name}. To "
            f"send 81 % less, a table has at most {STATED_PART / ratio:.2f} cells per coordinate, "
            f"and its estimates have an expected error of {ratio / STATED_PART:.1f} times the "
            "squared norm."
        )
    return text


def prose(results: Results) -> list[str]:
    """The paragraphs of the README."""
    config, facts = results.config, of_kind(results.rows, "fact")
    costs = [row for row in facts if row["about"] == "sparse"]
    densities = [row for row in facts if row["about"] == "density"]
    leaves = [LeafDensity(*(row[name] for name in LeafDensity._fields)) for row in densities]
    sparse = [leaf for leaf in leaves if leaf.is_sparse]
    workers = costs[0]["workers"]
    sends = [f"- `{row['method']}`: {SPARSE_METHODS[row['method']].sends}" for row in costs]
    return [
        f"words, {workers} simulated workers, {config.steps} steps of {config.batch} "
        f"examples, Adagrad; all methods have the same weights and "
        "batches per seed. Every method tunes its learning rate, from "
        f"{', '.join(f'{rate:g}' for rate in config.learning_rates)}, and options that do not "
        "change its bytes, if it has any. A trial is scored on a held-out fifth of the training "
        "set; the reported seeds are trained on the whole training set. One small model, one small "
        "dataset, the same number of steps for all methods. One device simulates all workers, so "
        "no times are measured: bytes are those of the program for all workers.",
        PROVENANCE,
        TUNING,
        CLAIMS,
        "Nonzero rows of each gradient, the maximum over "
        f"{config.calibration_batches} batches of seed {config.seeds}: `worker` of one worker, "
        "`union` of any worker, and `shard` of the same in the rows of one server, which has one "
        f"of every {workers} rows; the fullest server is listed. A leaf with rows is sparse if at "
        f"most {100 * MAX_DENSITY:.0f} % of them are in the union of the workers: "
        f"{', '.join(f'`{leaf.leaf}`' for leaf in sparse)}. The capacity is {MARGIN:g} times the "
        "measured number. `mean` sends all other leaves in the same step. "
        f"{predict(sparse, workers)}",
        fact_table(results.rows, "density"),
        "\n".join(["For the sparse leaves, each worker sends:\n", *sends]),
        TABLE,
        "The held-out loss is the cross-entropy of the test set. ± is the standard deviation over "
        "seeds. "
        "`from dense` is the difference from `mean`, paired by seed, with its 95 % interval; then "
        "the same difference in standard deviations of `mean`. `ratio` is the tuned number of "
        "coordinates in the update, over those of the capacity for one worker. Bytes are read from "
        "the traced program.",
        FIGURES,
    ]


SPARSE = Study(
    "sparse",
    Sparse,
    lambda config: [{"method": method} for method in prepare(config).methods],
    make_trainer,
    MEASURED,
    prose,
    figures=(
        Points(
            file="held_out_loss_against_sparse_bytes.png",
            caption="Held-out loss against sparse bytes; the band is one sd of the dense mean",
            by="method",
            x=(
                Axis("sparse_bytes", "kB of the sparse leaves that a worker sends in a step", 1e-3),
            ),
            y=Axis("test_loss", "held-out loss", log=False),
            mark=mark,
            finish=mark_reference,
        ),
    ),
    claims=STATED,
    grid=grid,
    budget=lambda config: config.trials,
    facts=facts,
)
