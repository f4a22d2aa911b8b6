"""Which methods lose to the exact mean, why, and how many bytes do they save?"""

import dataclasses
from collections.abc import Sequence

from experiments.cli import options
from experiments.cli.options import option, positive_integer, positive_number
from experiments.study import groups, losers, panels, readme, targets
from experiments.study.claims import Claim, Results
from experiments.study.columns import SEEDS, Column, Table, key, only_in_csv
from experiments.study.figure import Points
from experiments.study.groups import relative
from experiments.study.judges import is_no_worse
from experiments.study.late import late
from experiments.study.search import Budget
from experiments.study.study import Study
from experiments.study.tidy import Row

SIGNIFICANCE = 0.01
CLAIMED = ("mean_bfloat16", "two_stage:4", "ef_top_1_percent")


@dataclasses.dataclass(frozen=True)
class Survey:
    """Which methods lose to the exact mean, why, and how many bytes do they save?

    Question: a small network per task, 8 simulated workers, five seeds. Every method is tuned with
    the same number of trials by the loss on a held-out fifth of the training set, and then trained
    on all of it. Which test loss does it reach, and is that higher than that of the exact mean from
    the same weights and batches? Which steps and bytes does it need to the loss of half a run?

    Command: `python -m experiments survey --tasks digits text glyphs`; `make survey` is for digits.
    Expected time on two CPU cores: half an hour for digits, one for text, and three for glyphs.

    Number: the ratio of each method's test loss to that of `mean`, and the ratio of its bytes.
    """

    tasks: tuple[str, ...] = option(
        ("digits",), "digits, and longer tasks: text, glyphs, or others as DATASET:PATH", many=True
    )
    methods: tuple[str, ...] = options.methods_option("all")
    optimizers: tuple[str, ...] = options.optimizers_option("sgd")
    seeds: int = options.seeds_option()
    steps: int = option(150, "steps of a run and of a trial on digits", positive_integer)
    long_steps: int = option(2000, "steps on other tasks; a trial has a quarter", positive_integer)
    batch: int = option(128, "examples per step, over all workers", positive_integer)
    learning_rates: tuple[float, ...] = option(
        (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
        "the first grid; every second rate if a method has more to tune", positive_number, many=True
    )  # fmt: skip
    trials: int = option(14, "points of its grid that each method tries", positive_integer)
    tuning_seeds: int = option(1, "additional seeds for each point", positive_integer)
    points: int = option(20, "logged losses per run", positive_integer)
    devices: int | None = options.devices_option()
    record: str = options.record_option("survey")
    records: str = options.records_option()
    resume: str | None = options.resume_option()


def derive(rows: Sequence[Row]) -> Sequence[Row]:
    with_task = [{"task": "digits", **row} for row in rows]  # Which older records lack.
    within, needs = ("task", "optimizer"), ("step", "bytes_sent")
    return targets.add_targets(with_task, within, {"method": "mean"}, "train_loss", needs)


P_VALUE = groups.p_value("test_loss", log=True, is_worse=True)
TABLE = Table(
    by=("task", "optimizer", "method"),
    columns=(
        *map(key, ("task", "optimizer", "method")),
        Column("kind", late("survey.kind"), text=True, hidden=True),
        SEEDS,
        Column("learning rate", groups.tuned("learning_rate"), name="learning_rate"),
        Column("also tuned", groups.tuned_beside("learning_rate"), name="also_tuned", hidden=True),
        Column("test loss", groups.spread("test_loss"), ".3f", "test_loss"),
        Column("of mean's", relative("test_loss"), ".2f", "loss_ratio"),
        Column("paired [95 %]", groups.difference("test_loss", log=True), ".2f", "paired"),
        Column("p", P_VALUE, ".3f"),
        Column("test accuracy %", groups.mean_of("test_accuracy"), ".1f", "test_accuracy", 100),
        Column("training loss", groups.mean_of("train_loss"), ".4f", "train_loss", hidden=True),
        Column("bytes/worker/step", groups.mean_of("bytes_per_step"), ",.0f", "bytes_per_step",
               hidden=True),
        Column("of mean's", relative("bytes_per_step"), ".3f", "bytes_ratio"),
        Column("steps to target", groups.mean_of("step_to_target"), ",.0f", "steps_to_target"),
        Column("bytes to target, of mean's", relative("bytes_sent_to_target"), ".3f",
               "target_bytes_ratio"),
        Column("reached", targets.reached("step"), hidden=True),
        Column("compression error", groups.mean_of("compression_error"), ".3g",
               "compression_error", hidden=True),
        only_in_csv("loses", losers.loses(P_VALUE, SIGNIFICANCE)),
        only_in_csv("saves", lambda group: relative("bytes_per_step")(group) < 0.99),
    ),
    reference={"method": "mean"},
)  # fmt: skip

CLAIM = Claim(
    f"The test loss of `{'`, `'.join(CLAIMED)}` is at most 1.1 times that of `mean`.",
    is_no_worse("test_loss", 1.1, log=True, methods={"method": CLAIMED}),
)

MARK = panels.colored("kind", crossed="loses")
FIGURE = Points(
    file="test_loss_against_bytes.png", caption="Test loss against bytes; crosses lose",
    by="method", across=("task", "optimizer"), numbered=True, mark=MARK,
    finish=panels.color_legend("kind", MARK), size=(7.0, 6.0),
    x=panels.Axis("bytes_ratio", "bytes sent, relative to the float32 mean"),
    y=panels.Axis("loss_ratio", "test loss, relative to the float32 mean"),
)  # fmt: skip


def prose(results: Results) -> Sequence[str]:
    from experiments.training.survey import REASONS

    config = results.config
    steps = {"digits": f"{config.steps} steps"}
    long = f"{config.long_steps} steps, a quarter in trials"
    return (
        f"{'; '.join(f'{name}: {steps.get(name, long)}' for name in config.tasks)}; "
        f"{results.workers} simulated workers, {config.batch} examples per step, {config.seeds} "
        "seeds. All methods have the same weights and batches per seed. Methods are tuned by the "
        "loss on a held-out fifth of the training set. The first learning rates are "
        f"{', '.join(f'{rate:g}' for rate in config.learning_rates)}. SGD has momentum 0.9, except "
        "for methods whose aggregator has momentum.",
        readme.PROVENANCE,
        readme.TUNING,
        *losers.describe_settings(results.lines, REASONS),
        readme.TABLE,
        "A method loses if its test loss is above that of `mean` by a one-sided paired t-test of "
        f"the logarithms over seeds, at p < {SIGNIFICANCE:g}; p is not corrected for the number of "
        "methods. The test loss is compared, since parameters were chosen by the loss on held-out "
        "examples; a higher rate alone can reduce the training loss, which is also listed. ± is "
        "the standard deviation over seeds. Ratios are to `mean`; the paired one is the geometric "
        "mean over seeds. The target is the training loss of `mean` after half of its steps; "
        "steps and bytes to it are means over seeds, `-` if a seed does not reach it. Bytes are "
        "means over steps. The compression error is ‖G - mean‖² / ‖mean‖² of an update G; it "
        "exceeds 1 if G has momentum or an earlier residual, and means nothing for signs.",
        "Small networks, small datasets, the same number of steps for all methods. Methods that "
        "lose here may not lose in a longer run, where feedback has more time; methods that tie "
        "here may not tie on a larger model. Options that are not tuned are defaults, or were set "
        "once by hand. One device simulates all workers, so no time is measured.",
        readme.CLAIMS,
        readme.FIGURES,
    )


STUDY = Study(
    "survey", Survey, late("survey.settings"), late("survey.train"), TABLE, prose, (FIGURE,),
    (CLAIM,), grid=late("survey.grid"), derive=derive, headline=("loss_ratio", "bytes_ratio"),
    budget=lambda config: Budget(config.trials, config.tuning_seeds),
)  # fmt: skip
