"""How many bytes does S2 Reducer save on sparse updates, compared with other methods?"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

import jaxcomm
from experiments.errors import ExperimentError, select
from experiments.sparse_methods import (
    MARGIN,
    MAX_DENSITY,
    SPARSE_METHODS,
    LeafDensity,
    SparseVariant,
    gradients_of_workers,
    measure_densities,
)
from experiments.study import table as groups
from experiments.study.claims import Claim, Results, is_at_most, is_no_worse
from experiments.study.plot import Axis, Points, reference_band
from experiments.study.record import of_kind
from experiments.study.run import CLAIMS, FIGURES, PROVENANCE, TABLE, TUNING, Study
from experiments.study.table import (
    SEEDS,
    Column,
    Line,
    Table,
    fact_table,
    first,
    key,
    max_of,
    only_in_csv,
    over,
)
from experiments.study.tuning import Budget
from experiments.tasks.task import Task
from experiments.timing import medians
from experiments.trainer import (
    OPTIMIZER_TITLES,
    RECORDED_MAXIMA,
    Program,
    count_bytes,
    make_mesh,
    make_program,
    over_programs,
)
from jaxcomm.testing._codec import send


@dataclasses.dataclass(frozen=True)
class Sparse:
    """How many bytes does S2 Reducer save on sparse updates, compared with other methods?

    Question: a language model with an embedding of 5,000 words on the text of Python's `help()`; 8
    workers, five seeds. How dense is the gradient of each leaf? How many bytes of the sparse leaves
    does each method send, how many milliseconds does it take to encode and decode them, and which
    held-out loss does it reach after the same number of steps? Does S2 Reducer save the 81 % that
    its paper states, at the loss of the dense mean?

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
    optimizer: Literal["adagrad", "sgd", "adam"] = "adagrad"
    """adagrad, which does not change rows whose gradient is 0; sgd (momentum 0.9); or adam"""
    learning_rates: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    """learning rates of the first grid"""
    trials: int = 6
    """points of its grid that each method tries"""
    tuning_seeds: int = 1
    """additional seeds, for the trials"""
    seeds: int = 5
    """number of seeds"""
    steps: int = 150
    """training steps per run"""
    batch: int = 256
    """examples per step, over all workers"""
    log_every: int = 150
    """steps between two logged losses"""
    calibration_batches: int = 20
    """batches that measure the densities"""
    repetitions: int = 9
    """timings of each codec"""
    devices: int | None = None
    """number of workers (default: the number in XLA_FLAGS, or 8)"""
    record: str = "sparse"
    """the record folder is <date>_NAME; none writes no record"""
    records: str = "runs"
    """folder in which the record folder is created"""
    resume: str | None = None
    """the folder of an interrupted record, which is continued"""


SCORED_EXAMPLES = 5000  # Training examples; the score of all takes longer than training.
STATED_PART = 0.19  # Of the bytes, which S2 Reducer sends according to its paper.


class Comparison(NamedTuple):
    """The task and the methods of a config.

    Attributes:
      held_out: The task whose test set is a validation set.
      mesh: The workers.
      leaves: The density of every leaf.
      gradients: The gradients of the sparse leaves in one batch, `[workers, ...]`, by path.
      program: `(method, with_diagnostics, **options) -> program`.
      programs: The program of every method, by name, without tuned options.
    """

    held_out: Task
    mesh: Mesh
    leaves: list[LeafDensity]
    gradients: dict[str, jax.Array]
    program: Callable[..., Program]
    programs: dict[str, Program]


@functools.lru_cache(maxsize=1)
def prepare(config: Sparse) -> Comparison:
    """Measures the densities, in the first batches of a trial's seed, and builds the programs.

    Raises:
      ExperimentError: If an option is invalid.
    """
    methods = select(config.methods, [*SPARSE_METHODS], "--methods")
    options = {"scored_examples": SCORED_EXAMPLES, "vocabulary": config.vocabulary}
    task = Task("words", config.data, **options)
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
    gradients = gradients_of_workers(params, calibration[-1], task=task, workers=mesh.size)
    gradients = {path: gradients[path] for path in capacities}

    def program(method: str, with_diagnostics: bool, **options: Any) -> Program:
        return make_program(
            task, SparseVariant(method, capacities, options), config.optimizer,
            config.learning_rates[0], config.batch, mesh,
            simulated=True, with_diagnostics=with_diagnostics,
        )  # fmt: skip

    programs = {method: program(method, True) for method in methods}
    return Comparison(held_out, mesh, leaves, gradients, program, programs)


def grid(config: Sparse, setting: Mapping[str, str]) -> dict[str, tuple[Any, ...]]:
    """The learning rates, and the options of the method that are tuned."""
    rates = tuple(sorted(set(config.learning_rates)))
    return {"learning_rate": (rates,), **SPARSE_METHODS[setting["method"]].grid}


def make_trainer(
    config: Sparse, setting: Mapping[str, str]
) -> Callable[..., Iterator[dict[str, Any]]]:
    """What trains a method; see `experiments.study.run.Trainer`."""
    comparison = prepare(config)

    def program(validation: bool, **options: Any) -> Program:
        # Diagnostics cost more than the step itself, and only the reported runs need them.
        return comparison.program(setting["method"], not validation, **options)

    return over_programs(program, comparison.held_out, config.steps, config.log_every, config.steps)


def time_codec(codec: jaxcomm.Codec, gradients: jax.Array, repetitions: int) -> dict[str, float]:
    """Median milliseconds in which a worker encodes its gradient, and decodes what it receives.

    A worker receives the sum of all payloads, or each of them.

    Args:
      codec: The codec.
      gradients: The gradients of a leaf, `[workers, ...]`.
      repetitions: The number of timings.
    """
    count, is_summed = len(gradients), codec.combine == "sum"

    @jax.jit
    def encode(context: jaxcomm.Context, x: jax.Array) -> Any:
        return codec.encode(context, x)[0], codec.measure(context, x)

    @jax.jit
    def decode(context: jaxcomm.Context, payloads: Any) -> jax.Array:
        if is_summed:
            return codec.decode(context.received(count), payloads)

        def add(total: jax.Array, payload: Any) -> tuple[jax.Array, None]:
            return total + codec.decode(context.received(), payload) / count, None

        return lax.scan(add, jnp.zeros(context.shape), payloads)[0]

    memories, key = jax.vmap(codec.init)(gradients), jax.random.key(0)
    step = jax.jit(functools.partial(send, codec))(gradients, memories, key)
    context, x = jax.tree.map(lambda leaf: leaf[0], (step.contexts, gradients))
    payloads = step.payloads
    if is_summed:
        payloads = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0, dtype=leaf.dtype), payloads)
    functions = {
        "encode_milliseconds": functools.partial(encode, context, x),
        "decode_milliseconds": functools.partial(decode, context, payloads),
    }
    return {name: 1e3 * seconds for name, seconds in medians(functions, repetitions).items()}


def facts(config: Sparse) -> Iterator[dict[str, Any]]:
    """The density of every leaf; the bytes of every method, and the times of its codec."""
    comparison = prepare(config)
    for leaf in comparison.leaves:
        yield {"about": "density", **leaf._asdict()}
    for method, program in comparison.programs.items():
        times = Counter[str]()
        codec = SPARSE_METHODS[method].codec
        for path, gradients in comparison.gradients.items() if codec else ():
            capacity = program.method.capacities[path]
            times.update(time_codec(codec(capacity), gradients, config.repetitions))
        yield {
            "about": "sparse",
            "method": method,
            "workers": comparison.mesh.size,
            "sparse_bytes": count_bytes(program.method, comparison.gradients, comparison.mesh),
            "step_bytes": program.account.bytes_per_worker,
            **(times or dict.fromkeys(("encode_milliseconds", "decode_milliseconds"), math.nan)),
        }


SENT, STEP = first("sparse_bytes", "fact"), first("step_bytes", "fact")
MEASURED = Table(
    by=("method",),
    columns=(
        key("method"),
        only_in_csv("workers", first("workers", "fact")),
        SEEDS,
        Column("learning rate", groups.tuned("learning_rate"), name="learning_rate"),
        Column("ratio", groups.tuned("ratio")),
        Column("held-out loss", groups.spread("test_loss"), ".3f", "test_loss"),
        Column("from dense", groups.difference("test_loss"), "+z.3f", "paired_difference"),
        Column("from dense, in its sd", groups.deviations("test_loss"), "+z.2f", "difference"),
        Column("sparse bytes/worker/step", SENT, ",.0f", "sparse_bytes"),
        Column("of dense", over(SENT, method="mean"), ".4f", "dense_ratio"),
        Column("of all-gather", over(SENT, method="all_gather"), ".3f", "all_gather_ratio"),
        Column("all bytes/worker/step", STEP, ",.0f", "step_bytes", hidden=True),
        *(Column(f"{name} ms", first(f"{name}_milliseconds", "fact"), ".2f", f"{name}_milliseconds")
          for name in ("encode", "decode")),
        Column("error", groups.mean_of("compression_error"), ".3g", hidden=True),
        *(Column(name.replace("_", " "), max_of(f"max_{name}"), ".3g", name, hidden=True)
          for name in ("expected_error", "overflow", "union_density", "unpeeled")),
        only_in_csv("is_within", lambda group: groups.deviations("test_loss")(group) <= 1),
    ),
    reference={"method": "mean"},
)  # fmt: skip

S2 = {"method": ("s2_mean_0.25", "s2_mean_1", "s2_median_1", "s2_peel", "s2_peel_8_bits")}
STATED = (
    Claim("S2 Reducer sends at least 81 % less for sparse leaves than the sparse all-gather.",
          is_at_most("all_gather_ratio", 0.19, methods=S2)),
    Claim("S2 Reducer sends at least 81 % less for sparse leaves than the dense all-reduce.",
          is_at_most("dense_ratio", 0.19, methods=S2)),
    Claim("The held-out loss is at most 0.5 % above that of the dense mean.",
          is_no_worse("test_loss", 1.005, log=True)),
)  # fmt: skip


def mark(line: Line) -> dict[str, Any]:
    families = dict.fromkeys(S2["method"], ("S2 Reducer", "tab:blue"))
    families |= dict.fromkeys(("mean", "mean_bfloat16", "all_gather"), ("reference", "black"))
    family, color = families.get(line["method"], ("other", "tab:orange"))
    marker, where = ("o", "") if line["is_within"] else ("X", ", above the band")
    return {"marker": marker, "color": color, "ecolor": (color, 0.35), "label": family + where}


def predict(sparse: Sequence[LeafDensity], workers: int) -> str:
    """The predicted bytes of a table with one cell per coordinate of the union."""
    sizes = [math.prod(leaf.shape) for leaf in sparse]
    worker, union, *_ = np.average([leaf.capacity for leaf in sparse], axis=0, weights=sizes)
    # A sum sends its table 2 (n-1)/n times; an all-gather sends n-1 payloads of values.
    ratios = {
        "the sparse all-gather": 2 * union / (workers * worker),
        "the dense all-reduce": union,
    }
    less = f"{100 * (1 - STATED_PART):.0f} % less"
    text = (
        f"[The paper of S2 Reducer](https://arxiv.org/abs/2110.02140) states that it sends {less}. "
        f"The union of {workers} workers is {union / worker:.2f} times as dense as the gradient of "
        f"one worker. The all-gather passes on {workers - 1} payloads, and a sum sends its table "
        f"{2 * (workers - 1) / workers:.2f} times."
    )
    for name, ratio in ratios.items():
        text += (
            f" Predicted: one cell per coordinate of the union costs {ratio:.2f} times {name}. To "
            f"send {less}, a table has at most {STATED_PART / ratio:.2f} cells per coordinate, and "
            f"its estimates have an expected error of {ratio / STATED_PART:.1f} times the squared "
            "norm."
        )
    return text


def prose(results: Results) -> list[str]:
    """The paragraphs of the README."""
    config, facts = results.config, of_kind(results.rows, "fact")
    costs = [row for row in facts if row["about"] == "sparse"]
    densities = [row for row in facts if row["about"] == "density"]
    leaves = [LeafDensity(*(row[name] for name in LeafDensity._fields)) for row in densities]
    sparse = [leaf for leaf in leaves if leaf.is_sparse]
    within = sorted(
        (line for line in results.lines if line["is_within"] and not line.group.is_reference),
        key=lambda line: line["sparse_bytes"],
    )
    fewest = ", ".join(f"`{line.where}`: {line['sparse_bytes']:,.0f}" for line in within)
    workers = costs[0]["workers"]
    maxima = "; ".join(f"`{name.replace('_', ' ')}`, {x}" for name, x in RECORDED_MAXIMA.items())
    sends = [f"- `{row['method']}`: {SPARSE_METHODS[row['method']].sends}" for row in costs]
    return [
        f"words, {workers} simulated workers, {config.steps} steps of {config.batch} "
        f"examples, {OPTIMIZER_TITLES[config.optimizer]}; all methods have the same weights and "
        "batches per seed. Every method tunes its learning rate, from "
        f"{', '.join(f'{rate:g}' for rate in config.learning_rates)}, and options that do not "
        "change its bytes, if it has any. A trial is scored on a held-out fifth of the training "
        "set; the reported seeds are trained on the whole training set. One small model, one small "
        "dataset, the same number of steps for all methods. One device simulates all workers, so "
        "no step times are measured: bytes are those of the program for all workers, and times are "
        "those of the codec on one device.",
        PROVENANCE,
        TUNING,
        CLAIMS,
        f"At most one standard deviation above dense, fewest bytes first: {fewest or 'none'}.",
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
        "the traced program. Encoding includes measuring the statistics that are reduced over "
        "workers; decoding is of all payloads that a worker receives. Each time is the median of "
        f"{config.repetitions}, or `-` if the method has no single codec. `error` is the squared "
        "error of the update of all leaves, relative to the squared norm of the mean, averaged "
        "over logged steps and seeds. The last columns are maxima over steps and seeds, for "
        f"methods that report them: {maxima}.",
        FIGURES,
    ]


SPARSE = Study(
    "sparse",
    Sparse,
    lambda config: [{"method": method} for method in prepare(config).programs],
    make_trainer,
    MEASURED,
    prose,
    figures=(
        Points(
            file="held_out_loss_against_sparse_bytes.png",
            caption="Held-out loss against sparse bytes; the band is one sd of the dense mean",
            by="method",
            x=Axis("sparse_bytes", "kB of the sparse leaves that a worker sends in a step", 1e-3),
            y=Axis("test_loss", "held-out loss", log=False),
            mark=mark,
            finish=reference_band("test_loss"),
        ),
    ),
    claims=STATED,
    grid=grid,
    budget=lambda config: Budget(config.trials, config.tuning_seeds),
    facts=facts,
    headline=("test_loss", "sparse_bytes"),
)
