"""Does 8-bit Global-QSGD train as well as the exact mean for about a quarter of its bytes?"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from experiments.cli import options
from experiments.cli.options import option, positive_integer, positive_number
from experiments.study import groups, panels, readme
from experiments.study.claims import Claim, Results, reject
from experiments.study.columns import SEEDS, Column, Table, key
from experiments.study.figure import Lines
from experiments.study.judges import exceeds_a_limit, is_at_most
from experiments.study.study import Setting, Study

CONTROLS = ("truncating", "top_1_percent")


@dataclasses.dataclass(frozen=True)
class Digits:
    """Does 8-bit Global-QSGD train as well as the exact mean for about a quarter of its bytes?

    Question: a small convolutional network on scikit-learn's digits, 8 workers, five seeds; every
    method starts from the same weights and sees the same batches. Is the mean final loss over the
    whole training set within 1.5 times that of the float32 mean, at no more than 0.26 of its bytes?
    The comparison must also discriminate: two controls, truncation instead of random rounding and
    the largest 1 % without error feedback, must each exceed one of the two limits.

    Command: `python -m experiments digits`, or `make demo`. With the default options, the exit code
    is 1 if a claim does not hold. Expected time: about three minutes on two CPU cores.

    Number: the ratio of the final loss of `global_qsgd:8` to that of `mean`, about 1.0 with SGD and
    momentum and about 1.2 with Adam, at 0.25 of the bytes.
    """

    methods: tuple[str, ...] = options.methods_option(
        "mean", "mean_bfloat16", "global_qsgd:8", "global_qsgd:16", "qsgd", *CONTROLS
    )
    optimizers: tuple[str, ...] = options.optimizers_option("sgd", "adam")
    seeds: int = options.seeds_option()
    steps: int = option(150, "training steps per run", positive_integer)
    batch: int = option(256, "examples per step, over all workers", positive_integer)
    learning_rate_sgd: float = option(0.05, "learning rate of SGD, momentum 0.9", positive_number)
    learning_rate_adam: float = option(0.002, "learning rate of Adam", positive_number)
    log_every: int = option(25, "steps between two logged losses", positive_integer)
    devices: int | None = options.devices_option()
    record: str = options.record_option("digits")
    records: str = options.records_option()
    resume: str | None = options.resume_option()


def train(config: Digits, setting: Setting) -> Any:
    from experiments.training.trainer import load_task, make_trainer

    rate = getattr(config, f"learning_rate_{setting['optimizer']}")
    lengths = {"steps": config.steps, "log_every": config.log_every}
    return make_trainer(config, **setting, task=load_task("digits"), learning_rate=rate, **lengths)


@functools.cache
def settings(config: Digits) -> Sequence[Setting]:
    from experiments.methods import expand

    pairs = itertools.product(dict.fromkeys(config.optimizers), expand(config.methods))
    found = [{"optimizer": optimizer, "method": method} for optimizer, method in pairs]
    for setting in found:  # An invalid option is an error before the first run.
        train(config, setting)
    return found


TABLE = Table(
    by=("optimizer", "method"),
    columns=(
        key("optimizer"),
        key("method"),
        SEEDS,
        Column("final training loss", groups.spread("train_loss"), ",.4f", "train_loss"),
        Column("ratio", groups.over_reference(groups.mean_of("train_loss")), ",.2f", "loss_ratio"),
        Column("paired ratio [95 %]", groups.difference("train_loss", log=True), ",.2f", "paired"),
        Column("higher in", groups.times_above("train_loss"), name="higher_in", hidden=True),
        Column("test accuracy %", groups.spread("test_accuracy"), ",.1f", "test_accuracy", 100),
        Column("difference [95 %]", groups.difference("test_accuracy", lower_is_better=False),
               "+.1f", "accuracy_difference", 100, hidden=True),
        Column("bytes/worker/step", groups.first("bytes_per_step"), ",.0f", "bytes_per_step"),
        Column("ratio", groups.over_reference(groups.first("bytes_per_step")), ",.3f",
               "bytes_ratio"),
        Column("compression error", groups.mean_of("compression_error"), ",.3f",
               "compression_error"),
        Column("ms/step", groups.median_of("step_milliseconds"), ",.1f", "step_milliseconds"),
    ),
    reference={"method": "mean"},
)  # fmt: skip

CLAIMS = (
    Claim(
        "`global_qsgd:8` has at most 1.5 times the mean final training loss of `mean`.",
        is_at_most("loss_ratio", 1.5, methods={"method": "global_qsgd:8"}),
    ),
    Claim(
        "`global_qsgd:8` sends at most 0.26 of the bytes of `mean`.",
        is_at_most("bytes_ratio", 0.26, methods={"method": "global_qsgd:8"}),
    ),
    Claim(
        "Each of the controls `truncating` and `top_1_percent` exceeds one of these limits.",
        exceeds_a_limit({"loss_ratio": 1.5, "bytes_ratio": 0.26}, methods={"method": CONTROLS}),
    ),
)

FIGURE = Lines(
    file="loss_against_bytes.png",
    caption="Training loss against bytes sent per worker",
    by="method", across=("optimizer",), band="range", size=(4.5, 4.2),
    x=(panels.Axis("bytes_sent", "bytes sent per worker (MB)", 1e-6),),
    y=panels.Axis("train_loss", "loss over the whole training set"),
    style=panels.marked_style("mean", dashed=CONTROLS),
)  # fmt: skip


def prose(results: Results) -> Sequence[str]:
    config, titles = results.config, {"sgd": "SGD with momentum", "adam": "Adam"}
    rates = (f"{getattr(config, f'learning_rate_{o}')} with {titles[o]}" for o in config.optimizers)
    return (
        f"digits, {results.workers} workers, {config.steps} steps of {config.batch} examples, "
        f"{config.seeds} seeds; all methods have the same weights and batches per seed; learning "
        f"rates {' and '.join(rates)}.",
        readme.PROVENANCE,
        readme.TABLE,
        "Losses are over the whole training set. ± is the standard deviation over seeds. Ratios "
        "and differences are to `mean`; the paired ratio is the geometric mean over seeds of the "
        "ratio of losses; `higher in` counts the seeds with a loss above that of `mean`. The "
        "compression error is ‖G - mean‖² / ‖mean‖² of an update G, averaged over logged steps and "
        "seeds; `-` for votes, which have another scale. ms/step is a median.",
        "All methods take the same number of steps; the figure shows the loss for the same bytes: "
        "mean and range over seeds, with dashed lines for controls. One small network and "
        "one small dataset verify the rounding; they do not predict results of larger models. All "
        "workers share one machine and no link is slow: ms/step is the cost of computation and "
        "does not show the time that fewer bytes would save.",
        readme.CLAIMS,
        readme.FIGURES,
    )


STUDY = Study(
    "digits", Digits, settings, train, TABLE, prose, (FIGURE,), CLAIMS,
    headline=("train_loss", "loss_ratio", "test_accuracy"), exit_code=reject,
)  # fmt: skip
