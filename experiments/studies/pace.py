"""Does Non-blocking SGD save the wall-clock time that the simulated clock predicts?"""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from experiments.cli import options
from experiments.cli.options import option, positive_integer, positive_number
from experiments.study.claims import Claim, Results
from experiments.study.columns import Column, Table, key
from experiments.study.figure import Lines
from experiments.study.groups import Group, interval, mean_of
from experiments.study.judges import is_better, is_equivalent
from experiments.study.late import late
from experiments.study.panels import Axis
from experiments.study.readme import TABLE
from experiments.study.statistics import mean
from experiments.study.study import Study
from experiments.study.tidy import Row, of_kind

TOLERANCE = 0.2


@dataclasses.dataclass(frozen=True)
class Pace:
    """Does Non-blocking SGD save the wall-clock time that the simulated clock predicts?

    Question: several processes of one machine train on scikit-learn's digits. Extra work in each
    mini-batch slows down the last process. How long do synchronous SGD and Non-blocking SGD with a
    deadline take to reach the same training loss? Does the simulated clock, with the measured times
    of mini-batches, predict the same ratio?

    Command: `python -m experiments launch --processes 4 -- pace`.

    Expected time: ten minutes on two idle CPU cores.

    Number: the ratio of the two times, measured and simulated.
    """

    repeats: int = option(9, "runs per strategy, each with another seed", positive_integer)
    windows: int = option(72, "windows of a synchronous run", positive_integer)
    minibatches: int = option(4, "mini-batches per worker and window", positive_integer)
    minibatch_size: int = option(16, "examples per mini-batch", positive_integer)
    learning_rate: float = option(0.4, "learning rate of plain SGD", positive_number)
    minibatch_seconds: float = option(
        0.02, "seconds of sleep per mini-batch, which emulate an accelerator", positive_number
    )
    slowdown: float = option(3.0, "slowdown of the last process", positive_number)
    deadline_slack: float = option(
        1.1, "deadline over the time in which a fast worker ends all mini-batches", positive_number
    )
    loss: float = option(0.4, "training loss at which the time is measured", positive_number)
    log_every: int = option(3, "windows between two evaluations of the loss", positive_integer)
    distributed: bool = options.flag("join the processes that `launch` has started")
    start_timeout: float = option(
        300.0, "seconds within which all processes must start", positive_number
    )
    record: str = options.record_option("pace")
    records: str = options.records_option()
    resume: str | None = options.resume_option()


def add_speedups(rows: Sequence[Row]) -> list[Row]:
    """Adds the time to the loss of the synchronous run of the same clock and seed over its own."""
    waited = {(row["clock"], row["seed"]): row["seconds_to_loss"]
              for row in of_kind(rows, "run") if row["strategy"] == "synchronous"}  # fmt: skip

    def speedup(row: Row) -> float:
        return waited.get((row["clock"], row["seed"]), math.nan) / row["seconds_to_loss"]

    return [row if row["kind"] == "point" else {**row, "speedup": speedup(row)} for row in rows]


def milliseconds(group: Group) -> str | None:
    """The medians over repeats of the times of mini-batches, for each worker."""
    times = [run["minibatch_seconds"] for run in group.runs if "minibatch_seconds" in run]
    medians = [statistics.median(each) for each in zip(*times, strict=True)]
    return ", ".join(f"{1e3 * each:.1f}" for each in medians) or None


TIMES = Table(
    by=("clock", "strategy"),
    columns=(
        key("clock"),
        key("strategy"),
        Column("seconds to the loss", interval("seconds_to_loss"), ".2f", "seconds_to_loss"),
        Column("times as fast", interval("speedup"), ".2f", "speedup"),
        Column("seconds", mean_of("seconds"), ".2f"),
        Column("mini-batches", mean_of("minibatches"), ",.0f", "minibatches"),
        Column("accuracy %", mean_of("test_accuracy"), ".1f", "test_accuracy", scale=100),
        Column("mini-batches, ms", milliseconds, name="minibatch_milliseconds", in_csv=False),
        Column("exchange, ms", lambda group: mean(group.values("exchange_seconds", optional=True)),
               ".1f", "exchange_seconds", scale=1e3),
    ),
    reference={"strategy": "synchronous"},
)  # fmt: skip


def compare(results: Results) -> str:
    """How much sooner Non-blocking SGD reaches the loss on both clocks, in a sentence."""
    speedups = {line.where: line["speedup"] for line in results.lines}
    wall, simulated = speedups["wall, non_blocking"], speedups["simulated, non_blocking"]
    off, cell = simulated.mean / wall.mean - 1, TIMES.columns[3].cell
    if math.isnan(off):
        return "Not every run reached the loss."
    return (
        f"Non-blocking SGD reached the loss {cell(wall)} times as fast as synchronous SGD; the "
        f"simulated clock predicts {cell(simulated)}, which is {100 * off:+.0f} % off: "
        f"{'within' if abs(off) <= TOLERANCE else 'NOT within'} {100 * TOLERANCE:.0f} %."
    )


def prose(results: Results) -> list[str]:
    config, times = results.config, results.lines[0].group.runs[0].get("minibatch_seconds", [])
    deadlines = {row["deadline"] for row in results.rows if "deadline" in row}
    return [
        f"digits, {len(times) or 'several'} processes of one machine, windows of "
        f"{config.minibatches} mini-batches of {config.minibatch_size} examples, plain SGD with "
        f"the rate {config.learning_rate:g} for both strategies. Each mini-batch sleeps "
        f"{1e3 * config.minibatch_seconds:g} ms, which emulates an accelerator. Each mini-batch of "
        "the last process also computes unused gradients for "
        f"{1e3 * (config.slowdown - 1) * config.minibatch_seconds:g} ms. So the processes do not "
        "compete for the cores. The strategies alternate, and the simulated clock trains on the "
        "same batches" + ", with the mean times of each pair of runs" * bool(times) + "."
        + "".join(f" The deadline is {1e3 * each:.1f} ms." for each in deadlines),
        compare(results), TABLE,
        f"Seconds to the loss {config.loss:g} over the whole training set, evaluated every "
        f"{config.log_every} windows; brackets are 95 % intervals over seeds. Speedups are paired "
        "by seed. The times of mini-batches, one per process, and of an exchange are medians.",
    ]  # fmt: skip


STUDY = Study(
    "pace", Pace, late("pace.settings"), late("pace.train"), TIMES, prose, processes=4,
    claims=(
        Claim("Non-blocking SGD reaches the loss sooner than synchronous SGD.",
              is_better("seconds_to_loss", methods={"strategy": "non_blocking"}, log=True)),
        Claim("The simulated clock predicts the ratio of the two times within a factor of 1.2.",
              is_equivalent("speedup", 1 + TOLERANCE, log=True,
                            methods={"clock": "simulated", "strategy": "non_blocking"},
                            reference={"clock": "wall"})),
    ),
    figures=[Lines(
        file="loss_against_seconds.png", caption="Training loss against seconds", by="strategy",
        across=("clock",), x=(Axis("seconds", "seconds"),), y=Axis("train_loss", "training loss"),
        at=None)],
    seeds=lambda config: range(config.repeats), inputs=late("pace.inputs"), interleaved=True,
    shares=("clock",), derive=add_speedups, headline=("seconds_to_loss", "minibatch_milliseconds"),
)  # fmt: skip
