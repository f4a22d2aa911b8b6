"""How far from the exact mean is each method on real gradients, and at how many bits?"""

import dataclasses
import math
from typing import Any

from experiments.cli import options
from experiments.cli.options import option
from experiments.study.claims import Claim, Results
from experiments.study.columns import Column, Table, key
from experiments.study.figure import Points
from experiments.study.frontier import frontier
from experiments.study.groups import Value, extent, first, mean_of, ratio_of
from experiments.study.judges import is_better, is_within
from experiments.study.late import late
from experiments.study.panels import Axis
from experiments.study.readme import CLAIMS, PROVENANCE, TABLE, TUNING
from experiments.study.study import Study

EXACT = 1e-12
"""Float32 sums in another order differ by less, relative to the squared norm of the mean."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """How far from the exact mean is each method on real gradients, and at how many bits?

    Question: distributed mean estimation. A small convolutional network is trained once on
    scikit-learn's digits with the exact mean. At a few steps of that run, every method estimates
    the mean of the gradients of the 8 workers, with new rounding in each of 20 draws. What is the
    squared error E|G - mean|^2 / |mean|^2 of each method, and how many bytes does it send?

    Command: `python -m experiments estimate`.

    Expected time: one to two minutes on two CPU cores.

    Number: the error of each method and its bits per coordinate: 0.04 for `global_qsgd:8` at 14
    bits; the float32 all-reduce of 8 workers sends 56.
    """

    methods: tuple[str, ...] = option(
        ("all",), "methods to compare, each METHOD or METHOD:BITS, or all", many=True
    )
    steps: tuple[int, ...] = option(
        (1, 20, 60, 150), "steps whose gradients are estimated", options.positive_integer, many=True
    )
    draws: int = option(20, "estimates of the same gradients per method", options.positive_integer)
    batch: int = option(256, "examples per step, over all workers", options.positive_integer)
    learning_rate: float = option(
        0.05, "learning rate of SGD with momentum 0.9", options.positive_number
    )
    seed: int = option(0, "seed of weights, batches and rounding", options.natural_number)
    devices: int | None = options.devices_option()
    record: str = options.record_option("estimate")
    records: str = options.records_option()
    resume: str | None = options.resume_option()
    dataset: str = "digits"


def unless_exact(value: Value) -> Value:
    return lambda group: value(group) if mean_of("error")(group) > EXACT else None


bias = unless_exact(ratio_of("squared_bias", "error"))
bits = first("bits_per_coordinate")
ERRORS = Table(
    by=("method",),
    columns=(
        key("method"),
        Column("error", extent("error"),
               lambda error: f"{error.mean:.2e}" if error.mean > EXACT else f"< {EXACT:.0e}"),
        Column("over steps", unless_exact(extent("error")),
               lambda error: f"{error.low:.1e} to {error.high:.1e}", in_csv=False),
        Column("share of bias", bias, "z.3f", "bias_share"),
        Column("of predicted", ratio_of("error", "predicted_error"), ".3f", "error_of_predicted"),
        Column("bytes/worker", first("bytes_per_worker"), ",.0f", "bytes_per_worker"),
        Column("bits/coordinate", bits, ".2f", "bits_per_coordinate"),
        Column("ratio", first("bytes_ratio"), ".3f", "bytes_ratio"),
        Column("error x bits", unless_exact(lambda group: mean_of("error")(group) * bits(group)),
               ".2e", "error_times_bits"),
        Column(None, lambda group: bias(group) if first("is_unbiased")(group) is True else None,
               name="share of bias if unbiased", in_csv=False),
    ),
    reference={"method": "mean_bfloat16"},
)  # fmt: skip


def prose(results: Results) -> list[str]:
    config, run = results.config, results.lines[0].group.runs[0]
    workers, size = run.get("workers", 8), run.get("coordinates", 10_858)
    best = frontier(
        [line for line in results.lines if line["error"].mean < 1],
        lambda line: (line["bits_per_coordinate"], max(line["error"].mean, EXACT)),
    )
    return [
        f"{config.dataset}, {workers} workers, {size:,} coordinates: the gradients of step "
        f"{', '.join(map(str, sorted({*config.steps})))} of one run of SGD with momentum and the "
        f"exact mean, {config.batch} examples per step, learning rate {config.learning_rate}; "
        f"{config.draws} draws of the rounding per step. The seeds of the record are these steps. "
        f"The workers' gradients at step {max(config.steps)} are in `gradients.npz`; the others "
        "follow from the seed.",
        PROVENANCE, TUNING, CLAIMS, TABLE,
        "The error is E‖G - mean‖² / ‖mean‖² of an estimate G, averaged over draws and then over "
        "steps; the next column is its range over steps. The share of bias is ‖E G - mean‖² over "
        "the error, the part that an average over more draws would not reduce: about 0 for "
        "unbiased rounding, 1 without random numbers. The prediction, for `global_qsgd:BITS`, is "
        "the variance of rounding at random to one of two levels. Bytes are those that a worker "
        "sends, as `jaxcomm.wire.account` counts. Bits are per coordinate; a float32 mean sends "
        f"{64 * (workers - 1) / workers:g}, and the ratio is to that. Errors up to {EXACT:.0e} are "
        "those of a float32 sum in another order. The estimate 0, which sends nothing, has an "
        "error of 1.",
        "No other method is better in both error and bits, from fewest bits to most: "
        f"{', '.join(f'`{line.where}`' for line in best)}. These are gradients of one small "
        "network, which fits into one bucket. Methods differ in the number of coordinates per "
        "norm: all in `global_qsgd` and `qsgd`, 256 in `two_stage` and `mean_float8`. More "
        "coordinates per norm give more noise, so other sizes have other errors. The rounding of "
        "`terngrad` is unbiased, but the method first clips gradients at 2.5 standard deviations.",
    ]  # fmt: skip


def mark_exact(axes: Any, results: Results, _: Any) -> None:
    exact = [line for line in results.lines if line["error"].mean <= EXACT]
    x = min((line["bits_per_coordinate"] for line in exact), default=math.nan)
    axes.axvline(x, color="black", linestyle=":", linewidth=1)
    text = f"exact: {', '.join(line.where for line in exact)}" if exact else ""
    axes.text(x, 0.02, text, transform=axes.get_xaxis_transform(), rotation=90, size=8)


STUDY = Study(
    "estimate", Estimate, late("mean_estimation.settings"), late("mean_estimation.train"), ERRORS,
    prose, claims=(
        Claim("The bias of every unbiased method is from -1 % to 1 % of its error.",
              is_within("share of bias if unbiased", -0.01, 0.01)),
        Claim("The error of every `global_qsgd:BITS` is within 5 % of its formula.",
              is_within("error_of_predicted", 0.95, 1.05)),
        Claim("`global_qsgd:16` has a lower error than `mean_bfloat16` for the same bytes.",
              is_better("error", methods={"method": "global_qsgd:16"}, log=True)),
    ),
    figures=[Points(
        file="error_against_bits.png", by="method", size=(8.0, 6.0), finish=mark_exact,
        caption="Error against bits per coordinate, and its range over steps (crosses: controls)",
        x=Axis("bits_per_coordinate", "bits sent per coordinate and worker"),
        y=Axis("over steps", "E‖G - mean‖² / ‖mean‖²"),
        mark=lambda line: {"marker": "X" if first("is_control")(line.group) is True else "o"},
        joined=lambda line: line.where.partition(":")[0],
    )],
    seeds=lambda config: sorted({*config.steps}),
    headline=("error", "bits_per_coordinate"), files=late("mean_estimation.files"),
)  # fmt: skip
