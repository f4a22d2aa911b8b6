"""How many bytes does S2 Reducer save on sparse updates, compared with other methods?"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from experiments.cli import options
from experiments.cli.options import option, positive_integer, positive_number
from experiments.study import groups
from experiments.study.claims import Claim, Results
from experiments.study.columns import SEEDS, Column, Line, Table, key, only_in_csv
from experiments.study.figure import Points
from experiments.study.groups import first, max_of, over
from experiments.study.judges import is_at_most, is_no_worse
from experiments.study.panels import Axis, reference_band
from experiments.study.readme import CLAIMS, FIGURES, PROVENANCE, TABLE, TUNING, fact_table
from experiments.study.search import Budget
from experiments.study.study import Study


@dataclasses.dataclass(frozen=True)
class Sparse:
    """How many bytes does S2 Reducer save on sparse updates, compared with other methods?

    Question: a language model with an embedding of 5,000 words on the text of Python's `help()`, or
    a factorization of MovieLens ratings; 8 workers, five seeds. How dense is the gradient of each
    leaf? How many bytes of the sparse leaves does each method send, how many milliseconds does it
    take to encode and decode them, and which held-out loss does it reach after the same number of
    steps? Does S2 Reducer save the 81 % that its paper states, at the loss of the dense mean?

    Command: `python -m experiments sparse`, or `make sparse`; 25 minutes on two idle CPU cores.

    Number: the bytes of the sparse leaves over those of the sparse all-gather and of the dense
    all-reduce, and the difference in held-out loss, paired by seed.
    """

    dataset: str = option("words", "dataset to train on", choices=("words", "movielens"))
    data: str | None = option(None, "a plain-text file for words, u.data for movielens")
    vocabulary: int | None = option(None, "size, only of words (default: 5000)", positive_integer)
    methods: tuple[str, ...] = option(("all",), "methods to compare, or all", many=True)
    optimizer: str = option(
        "adagrad",
        "adagrad, which does not change rows whose gradient is 0; sgd (momentum 0.9); or adam",
        choices=("adagrad", "sgd", "adam"),
    )
    learning_rates: tuple[float, ...] = option(
        (0.01, 0.03, 0.1, 0.3), "learning rates of the first grid", positive_number, many=True
    )
    trials: int = option(6, "points of its grid that each method tries", positive_integer)
    tuning_seeds: int = option(1, "additional seeds, for the trials", positive_integer)
    seeds: int = options.seeds_option()
    steps: int = option(150, "training steps per run", positive_integer)
    batch: int = option(256, "examples per step, over all workers", positive_integer)
    log_every: int = option(150, "steps between two logged losses", positive_integer)
    calibration_batches: int = option(20, "batches that measure the densities", positive_integer)
    repetitions: int = option(9, "timings of each codec", positive_integer)
    devices: int | None = options.devices_option()
    record: str = options.record_option("sparse")
    records: str = options.records_option()
    resume: str | None = options.resume_option()


def training(name: str) -> Callable[..., Any]:
    """A function of the module that trains, which is imported when the function is called."""
    module = "experiments.training.sparse"
    return lambda *arguments: getattr(importlib.import_module(module), name)(*arguments)


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


def prose(results: Results) -> list[str]:
    setup, densities, legend, notes = training("describe")(results.config, results.rows)
    within = sorted(
        (line for line in results.lines if line["is_within"] and not line.group.is_reference),
        key=lambda line: line["sparse_bytes"],
    )
    fewest = ", ".join(f"`{line.where}`: {line['sparse_bytes']:,.0f}" for line in within)
    order = f"At most one standard deviation above dense, fewest bytes first: {fewest or 'none'}."
    table = fact_table(results.rows, "density")
    parts = [PROVENANCE, TUNING, CLAIMS, order, densities, table, legend, TABLE, notes, FIGURES]
    return [setup, *parts]


STUDY = Study(
    "sparse", Sparse, training("settings"), training("make_trainer"), MEASURED, prose,
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
    grid=training("grid"),
    budget=lambda config: Budget(config.trials, config.tuning_seeds),
    facts=training("facts"),
    headline=("test_loss", "sparse_bytes"),
)  # fmt: skip
