"""Which outer steps that send little reach the loss of training that sends every gradient?"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.cli import options
from experiments.cli.options import option, positive_integer, positive_number
from experiments.study import readme
from experiments.study.claims import Claim, Results
from experiments.study.columns import SEEDS, Column, Table, key
from experiments.study.figure import Points
from experiments.study.groups import difference, mean_of, over_reference, spread, tuned
from experiments.study.judges import is_no_worse
from experiments.study.late import late
from experiments.study.panels import COLORS, Axis
from experiments.study.search import Budget
from experiments.study.study import Study
from experiments.study.tidy import Row, of_kind

BASELINE = {"method": "synchronous", "period": 1}


@dataclasses.dataclass(frozen=True)
class Outer:
    """Which outer steps that send little reach the loss of training that sends every gradient?

    Question: a small convolutional byte model on Python's help texts, 2, 4 and 8 simulated workers,
    exchanges every 8, 32 and 128 steps. Which test loss do DiLoCo, SparseLoCo, MuLoCo, 4-bit
    Streaming DiLoCo, eager and delayed updates, and NoLoCo reach, and with how many bytes, beside
    the synchronous training with the same inner optimizer? Which claims of their papers hold here?

    Command: `python -m experiments outer`. Expected time: a quarter of an hour on one CPU core.
    Number: the paired ratio of the test loss to that of the own baseline, and the ratio of bytes.
    """

    seeds: int = options.seeds_option(3)
    steps: int = option(512, "training steps per run; a trial has half of them", positive_integer)
    batch: int = option(16, "windows per step, over all workers", positive_integer)
    workers: tuple[int, ...] = option((2, 4, 8), "numbers of workers", positive_integer, many=True)
    periods: tuple[int, ...] = option(
        (8, 32, 128), "steps between exchanges", positive_integer, many=True
    )
    learning_rates: tuple[float, ...] = option(
        (0.003, 0.01, 0.03, 0.1),
        "the grid of rates of the baselines", positive_number, many=True
    )  # fmt: skip
    outer_scales: tuple[float, ...] = option(
        (0.3, 1.0), "factors on the outer rates of the papers", positive_number, many=True
    )
    log_every: int = option(128, "steps between two logged losses", positive_integer)
    methods: tuple[str, ...] = option(("all",), "methods to compare, or all", many=True)
    record: str = options.record_option("outer")
    records: str = options.records_option()
    resume: str | None = options.resume_option()


def grid(config: Outer, setting: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The rates of the baselines, and the outer rates of other methods, which take the former."""
    if BASELINE.items() <= setting.items():
        return {"learning_rate": (config.learning_rates,)}
    if setting["period"] == 1:
        return None
    return {"outer_scale": (config.outer_scales,)}


def inputs(
    config: Outer, rows: Sequence[Row], setting: Mapping[str, Any], seed: int
) -> Mapping[str, Any]:
    """The rate that the baseline with the same workers and inner optimizer has chosen."""
    if BASELINE.items() <= setting.items():
        return {}
    own = {**setting, **BASELINE}
    (rate,) = {row["learning_rate"] for row in of_kind(rows, "run") if own.items() <= row.items()}
    return {"learning_rate": rate}


RATIO = difference("test_loss", log=True)
TABLE = Table(
    by=("workers", "inner", "period", "method"),
    columns=(
        *map(key, ("workers", "inner", "period", "method")),
        SEEDS,
        Column("rate", tuned("learning_rate"), name="learning_rate"),
        Column("outer scale", tuned("outer_scale"), name="outer_scale"),
        Column("test loss", spread("test_loss"), ".3f", "test_loss"),
        Column("of the baseline's [95 %]", RATIO, ".3f", "loss_ratio"),
        Column("test accuracy %", mean_of("test_accuracy"), ".1f", "test_accuracy", 100),
        Column("training loss", mean_of("train_loss"), ".3f", "train_loss", hidden=True),
        Column("bytes/worker/step", mean_of("bytes_per_step"), ",.0f", "bytes_per_step"),
        Column("bytes ratio", over_reference(mean_of("bytes_per_step")), ".5f", "bytes_ratio"),
    ),
    reference=BASELINE,
    adjacent=("workers", "inner", "period"),
)


def _of(method: str, inner: str = "adam") -> dict[str, Any]:
    return {"method": method, "inner": inner}


def _no_worse(margin: float, methods: dict[str, Any], than: dict[str, Any]) -> Any:
    return is_no_worse("test_loss", margin, log=True, methods=methods, reference=than)


CLAIMS = (
    Claim(
        "DiLoCo has at most 1.05 times the test loss of its synchronous baseline.",
        is_no_worse("test_loss", 1.05, log=True, methods={"method": "diloco"}),
    ),
    Claim(
        "SparseLoCo has at most the test loss of DiLoCo at the same period.",
        _no_worse(1.0, _of("sparseloco"), {"method": "diloco"}),
    ),
    Claim(
        "The 4 bits of MuLoCo cost at most 2 % of test loss: 1.02 times that of DiLoCo with Muon.",
        _no_worse(1.02, _of("muloco", "muon"), {"method": "diloco"}),
    ),
    Claim(
        "MuLoCo has at most the test loss of DiLoCo with Adam.",
        _no_worse(1.0, _of("muloco", "muon"), _of("diloco")),
    ),
    Claim(
        "Streaming DiLoCo in 4 bits has at most 1.05 times the test loss of DiLoCo.",
        _no_worse(1.05, _of("streaming_4_bits"), {"method": "diloco"}),
    ),
    Claim(
        "Eager updates have at most the test loss of delayed ones.",
        _no_worse(1.0, _of("eager"), {"method": "delayed"}),
    ),
    Claim(
        "Eager updates have at most 1.05 times the test loss of DiLoCo.",
        _no_worse(1.05, _of("eager"), {"method": "diloco"}),
    ),
    Claim(
        "NoLoCo has at most 1.05 times the test loss of DiLoCo at the same period.",
        _no_worse(1.05, _of("noloco"), {"method": "diloco"}),
    ),
)


def _mark(line: Any) -> Mapping[str, Any]:
    period, muon = line.group.keys["period"], line.group.keys["inner"] == "muon"
    names = list(dict.fromkeys((1, 8, 32, 128, period)))
    return {"marker": "s" if muon else "o", "color": COLORS[names.index(period) % len(COLORS)]}


FIGURE = Points(
    file="test_loss_against_bytes.png",
    caption="Test loss against bytes; orange, green, red: periods of 8, 32, 128; squares: Muon",
    by="method", across=("workers",), numbered=True, mark=_mark, size=(5.0, 4.6),
    x=Axis("bytes_ratio", "bytes sent, relative to the own baseline"),
    y=Axis("loss_ratio", "test loss, relative to the own baseline"),
)  # fmt: skip


def prose(results: Results) -> Sequence[str]:
    from experiments.methods.outer import METHODS

    config = results.config
    legend = "\n".join(
        f"- `{name}`: {METHODS[name].sends}"
        for name in dict.fromkeys(line.group.keys["method"] for line in results.lines)
    )
    return (
        f"A byte model on Python's help texts, {config.steps} steps of {config.batch} windows of "
        f"32 bytes over all workers, {config.seeds} seeds. All methods have the same weights, "
        "parts and batches per seed. The baseline of a method is the synchronous training with as "
        "many workers and the same inner optimizer, Adam or Muon. Its rate is tuned, and all "
        "methods with this inner optimizer and number of workers take it. Of these, the outer rate "
        "is tuned, as a factor on that of the paper. All other settings are those of the papers, "
        "with the periods of this study.",
        readme.PROVENANCE, readme.TUNING, readme.CLAIMS, f"Each worker sends:\n\n{legend}",
        readme.TABLE,
        "Losses are of the mean of the parameters of all workers. ± is the standard deviation over "
        "seeds. A ratio is the geometric mean over paired seeds, to the own baseline. Bytes are "
        "those of the traced program, with conditionals in the share of steps that takes them. "
        "`sparseloco` and other gathered messages grow with the number of workers.",
        "A small model and short runs: at a period of 128 there are few exchanges, in which an "
        "outer momentum of 0.9 does not reach its steady state. Methods that lose here may not "
        "lose in longer runs. One device simulates all workers, so no time is measured.",
        readme.FIGURES,
    )  # fmt: skip


STUDY = Study(
    "outer", Outer, late("outer.settings"), late("outer.Trainer"), TABLE, prose, (FIGURE,), CLAIMS,
    grid=grid, inputs=inputs, headline=("test_loss", "loss_ratio"),
    budget=lambda config: Budget(len(config.learning_rates), extensions=0),
)  # fmt: skip
