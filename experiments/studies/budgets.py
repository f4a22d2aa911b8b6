"""How much time do smaller budgets of a worker on a slow link save?"""

import dataclasses
from collections.abc import Sequence

from experiments.cli import options
from experiments.cli.options import option, positive_integer, positive_number
from experiments.study import readme, targets
from experiments.study.claims import Claim, Results
from experiments.study.columns import SEEDS, Column, Table, key
from experiments.study.figure import Lines
from experiments.study.groups import difference, first, spread, tuned
from experiments.study.judges import is_better, is_no_worse
from experiments.study.late import late
from experiments.study.panels import Axis
from experiments.study.search import Budget
from experiments.study.study import Study
from experiments.study.tidy import Row

TIME, REFERENCE = "seconds_to_target", {"method": "equal_8_4"}


@dataclasses.dataclass(frozen=True)
class Budgets:
    """How much time do smaller budgets of a worker on a slow link save?

    Question: 8 simulated workers train scikit-learn's digits; the link of one is as fast as the
    others', or 4 or 16 times slower. All wait for it. How much sooner do they reach a training
    loss if only this worker sends 2 bits in place of 8, and does the loss per step suffer?

    Command: `python -m experiments budgets`. Expected time: three minutes on two CPU cores.
    Number: seconds to the same loss over those of equal budgets with the same code of the mean.
    """

    seeds: int = options.seeds_option()
    steps: int = option(200, "training steps per run; a trial has half of them", positive_integer)
    batch: int = option(256, "examples per step, over all workers", positive_integer)
    workers: int = option(8, "simulated workers", positive_integer)
    learning_rates: tuple[float, ...] = option(
        (0.03, 0.1, 0.3), "the grid of rates of SGD with momentum", positive_number, many=True
    )
    log_every: int = option(10, "steps between two logged losses", positive_integer)
    slowdowns: tuple[float, ...] = option(
        (1.0, 4.0, 16.0), "how many times slower one link is", positive_number, many=True
    )
    bandwidth: float = option(1e6, "bytes per second and direction of a link", positive_number)
    step_seconds: float = option(0.005, "seconds of computation per step", positive_number)
    methods: tuple[str, ...] = option(("all",), "methods to compare, or all", many=True)
    record: str = options.record_option("budgets")
    records: str = options.records_option()
    resume: str | None = options.resume_option()


def derive(rows: Sequence[Row]) -> list[Row]:
    return targets.add_targets(
        rows, ("slowdown",), REFERENCE, "train_loss", ("seconds",), interpolated=True
    )


TABLE = Table(
    by=("slowdown", "method"),
    columns=(
        key("slowdown"),
        key("method"),
        SEEDS,
        Column("rate", tuned("learning_rate")),
        Column("ms/step", first("step_milliseconds"), ",.1f", "step_milliseconds"),
        Column("slow worker sends", first("slow_sent"), ",.0f", "slow_sent"),
        Column("receives", first("slow_received"), ",.0f", "slow_received"),
        Column("another sends", first("others_sent"), ",.0f", "others_sent"),
        Column("receives", first("others_received"), ",.0f", "others_received"),
        Column("training loss, last half", spread("late_loss"), ",.4f", "late_loss"),
        Column("of equal_8_4 [95 %]", difference("late_loss", log=True), ",.2f", "late_ratio"),
        Column("test loss", spread("test_loss"), ",.4f", "test_loss"),
        Column("seconds to target", targets.needed("seconds"), ".2f"),
        Column("reached", targets.reached("seconds")),
        Column("of equal_8_4", difference(TIME, log=True), targets.show_ratio, name="of equal"),
    ),
    reference=REFERENCE,
    adjacent=("slowdown",),
)


def prose(results: Results) -> list[str]:
    from experiments.training.budgets import BLOCK, METHODS

    config = results.config
    legend = "\n".join(f"- `{name}`: {what}" for name, (_, what) in METHODS.items())
    return [
        f"digits, {config.workers} simulated workers, {config.steps} steps of {config.batch} "
        "examples, SGD with momentum 0.9. All methods have the same weights and batches per seed; "
        f"the rate is tuned by method. Blocks of {BLOCK} coordinates have a norm.",
        readme.PROVENANCE, readme.TUNING, readme.CLAIMS, legend, readme.TABLE,
        "The seconds are simulated. A step takes "
        f"{1e3 * config.step_seconds:g} ms of computation and then its stages one after the other. "
        "A stage ends when the slowest link has moved what its worker sends and receives, at "
        f"{config.bandwidth:g} bytes per second in each direction, divided by the slowdown for "
        "worker 0. Bytes are those of the traced program for each worker. Latencies are left out: "
        "`budgeted_mean` sends up to two permutations per worker where an all-to-all is one "
        "collective, which counts on links of high latency. The training does not depend on the "
        "clock, so the rows of a method differ in seconds only. The target is the training loss of "
        "`equal_8_4` after half of its steps.",
        readme.FIGURES,
    ]  # fmt: skip


STUDY = Study(
    "budgets", Budgets, late("budgets.settings"), late("budgets.Trainer"), TABLE, prose,
    figures=[Lines(
        file="loss_against_seconds.png", caption="Training loss against simulated seconds",
        by="method", across=("slowdown",), x=(Axis("seconds", "simulated seconds"),),
        y=Axis("train_loss", "training loss"), finish=targets.mark,
    )],
    claims=[
        Claim("Where a link is slower, `slow_2_4` takes less time to the target than `equal_8_4`.",
              is_better(TIME, methods={"method": "slow_2_4", "slowdown": (4.0, 16.0)}, log=True)),
        Claim("`slow_2_4` has at most 1.1 times its training loss over the last half of the steps.",
              is_no_worse("late_loss", 1.1, methods={"method": "slow_2_4"}, log=True)),
        Claim("`equal_2_4`, with 2 bits for all, has at most 1.1 times this loss as well.",
              is_no_worse("late_loss", 1.1, methods={"method": "equal_2_4"}, log=True)),
    ],
    derive=derive, shares=("method",), headline=("step_milliseconds", "of equal"),
    grid=lambda config, setting: {"learning_rate": (config.learning_rates,)},
    budget=lambda config: Budget(len(config.learning_rates), 1),
)  # fmt: skip
