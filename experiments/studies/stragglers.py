"""How much time does training without waiting for slow workers save?"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.cli import options
from experiments.cli.options import fraction, option, positive_integer, positive_number
from experiments.study import targets
from experiments.study.claims import Claim, Results
from experiments.study.columns import SEEDS, Column, Table, key
from experiments.study.figure import Lines
from experiments.study.groups import (
    compared_with,
    difference,
    mean_of,
    spread,
    tuned,
    tuned_beside,
)
from experiments.study.judges import is_better, is_equivalent, is_no_worse
from experiments.study.late import late
from experiments.study.panels import COLORS, Axis
from experiments.study.readme import CLAIMS, FIGURES, PROVENANCE, TABLE, TUNING
from experiments.study.search import Axis as Values
from experiments.study.search import Budget, Grid
from experiments.study.signs import describe_signs
from experiments.study.study import Study
from experiments.study.tidy import Row

KEYS = ("dataset", "speeds", "method", "form")
WINDOWS = ("all_reduce", "local_sgd", "dpsgd", "matcha")
NAMES = {"all_reduce": "SGD", "dpsgd": "D-PSGD", "matcha": "MATCHA"}
EVENTS = {
    "bulk_synchronous": "synchronous SGD of the event engine",
    "synchronous_server": "synchronous SGD through a server",
    "backup_workers": "SGD with backup workers",
    "stale_synchronous": "SSP",
    "parameter_server": "asynchronous SGD",
    "staleness_aware": "asynchronous SGD with staleness-aware rates",
    "easgd": "EASGD",
    "eamsgd": "EAMSGD",
    "ad_psgd": "AD-PSGD",
    "lag_wk": "LAG-WK",
    "laq": "LAQ",
    "asy_lpg": "AsyLPG",
    "decoupled_diloco": "Decoupled DiLoCo",
}
METHODS = (*WINDOWS, *EVENTS)
FORMS = {"blocking": "--", "abort_new_time": "-.", "abort_same_time": "-", "finish_late": ":"}
LINES = {
    **{f"{method} {form}": {"color": COLORS[number], "linestyle": line}
       for number, method in enumerate(WINDOWS) for form, line in FORMS.items()},
    **{f"{method} events": {"color": COLORS[number % 7], "linestyle": ("-", "--")[number // 7]}
       for number, method in enumerate(EVENTS)},
}  # fmt: skip
BLOCKING = {"form": "blocking"}
ALL_REDUCE = {"method": "all_reduce", **BLOCKING}
SYNCHRONOUS = {"method": "synchronous_server", "form": "events"}
TIME = "seconds_to_target"
DERIVED = ("strategy", "family")


@dataclasses.dataclass(frozen=True)
class Stragglers:
    """How much time does training without waiting for slow workers save?

    Question: 8 simulated workers, some of them slow, train scikit-learn's digits and a language
    model of bytes. How long do synchronous SGD, local SGD, D-PSGD and MATCHA take to a training
    loss on a simulated clock, and how long do their non-blocking forms take, if all are tuned? How
    long do stale and asynchronous methods take, on the same clock and as well tuned?

    Command: `python -m experiments stragglers`.

    Expected time: two hours on two CPU cores.

    Number: seconds to the same loss over those of the blocking form, or of synchronous SGD. The
    paper of non-blocking SGD claims up to half.
    """

    seeds: int = options.seeds_option()
    trials: int = option(10, "points that the tuning of a setting tries", positive_integer)
    trial_seeds: int = option(1, "seeds of a trial", positive_integer)
    trial_part: float = option(0.5, "simulated time of a trial, as a part of a run's", fraction)
    seconds: float = option(8.0, "simulated seconds of a run", positive_number)
    text_seconds: float = option(6.0, "the same for the dataset text", positive_number)
    points: int = option(32, "logged losses of a run", positive_integer)
    minibatch_size: int = option(16, "examples per mini-batch", positive_integer)
    datasets: tuple[str, ...] = option(("all",), "digits, digits_by_label, text, or all", many=True)
    speeds: tuple[str, ...] = option(("all",), "such as 3:1 or dead_slow, or all", many=True)
    methods: tuple[str, ...] = option(("all",), "such as all_reduce or easgd, or all", many=True)
    forms: tuple[str, ...] = option(("all",), f"{', '.join(FORMS)}, events, or all", many=True)
    minibatch_seconds: float = option(0.01, "seconds of a fast mini-batch", positive_number)
    bandwidth: float = option(12.5e6, "bytes per second that a worker sends", positive_number)
    latency: float = option(2e-4, "seconds of latency per message", positive_number)
    record: str = options.record_option("stragglers")
    records: str = options.records_option()
    resume: str | None = options.resume_option()


MINIBATCHES = {"minibatches": Values((1, 4), 1, 8)}
PERIOD = {"period": Values((4, 16), 1, 64)}
OWN: Mapping[str, Grid] = {
    "local_sgd": PERIOD,
    "backup_workers": {
        "backups": Values((1, 3), 1, 6),
        "in_flight": Values(("finish_late", "abort")),
    },
    "stale_synchronous": {"staleness": Values((1, 4), 1, 32)},
    "easgd": PERIOD,
    "eamsgd": {**PERIOD, "momentum": Values((0.5, 0.9), 0.1, 0.95)},
    "lag_wk": {"threshold": Values((0.1, 0.5), 0.01, 0.9)},
    "laq": {"threshold": Values((0.1, 0.5), 0.01, 0.9), "bits": Values((4, 8), 2, 16)},
    "asy_lpg": {"steps": Values((32, 128), 8, 512)},
    "decoupled_diloco": {**PERIOD, "quorum": Values((4, 7), 1, 8)},
}


def grid(config: Stragglers, setting: Mapping[str, str]) -> Grid:
    rates = Values((0.4, 1.6, 6.4) if setting["dataset"] == "text" else (0.1, 0.4, 1.6))
    return {"learning_rate": rates, **OWN.get(setting["method"], MINIBATCHES)}


def derive(rows: Sequence[Row]) -> list[Row]:
    named = [
        {
            **row,
            "strategy": f"{row['method']} {row['form']}",
            "family": "windows" if row["form"] in FORMS else "events",
        }
        for row in rows
    ]
    reference = {"speeds": "3:1", **ALL_REDUCE}
    return targets.add_targets(
        named, ("dataset",), reference, "train_loss", ("seconds",), interpolated=True
    )


TIMES = Table(
    by=KEYS,
    columns=(
        *map(key, KEYS), SEEDS,
        Column("rate", tuned("learning_rate")),
        Column("mini-batches", tuned("minibatches")), Column("period", tuned("period")),
        Column("other", tuned_beside("learning_rate", "minibatches", "period", *DERIVED),
               hidden=True),
        Column("seconds to target", targets.needed("seconds"), ".2f"),
        Column("reached", targets.reached("seconds")),
        Column("of blocking", difference(TIME, log=True), targets.show_ratio),
        Column("of fastest blocking",
               targets.over_fastest("seconds", [{"method": m, **BLOCKING} for m in WINDOWS]),
               targets.show_ratio),
        Column("of synchronous", compared_with(difference(TIME, log=True), **SYNCHRONOUS),
               targets.show_ratio),
        Column("throughput", mean_of("throughput"), ".2f"),
        Column("aborted %", mean_of("aborted"), ".0f", scale=100),
        Column("staleness", mean_of("mean_staleness", optional=True), ".1f", hidden=True),
        Column("uploads", mean_of("uploads", optional=True), ".2f", hidden=True),
        Column("training loss", spread("train_loss"), ".3f", hidden=True),
        Column("on slow shard", spread("slow_shard_loss"), ".3f", hidden=True),
        Column("test loss", spread("test_loss"), ".3f"),
        Column("test accuracy %", spread("test_accuracy"), ".1f", scale=100, hidden=True),
    ),
    reference=BLOCKING,
)  # fmt: skip


def prose(results: Results) -> list[str]:
    lines, where = results.lines, ("dataset", "speeds", "method", "form")
    signs = [
        f"{name}, time to the target relative to the tuned blocking form, by the 95 % interval: "
        f"{describe_signs(own, 'of blocking', where)}. Relative to half of that time, which the "
        "paper claims to be possible for D-PSGD and MATCHA: "
        f"{describe_signs(own, 'of blocking', where, equal=0.5)}."
        for method, name in NAMES.items()
        if (own := [line for line in lines if line.group.keys["method"] == method])
    ]
    free = [line for line in lines if line.group.keys["form"] in [*FORMS][1:]]
    events = [line for line in lines if line.group.keys["form"] not in FORMS]
    shown = {key for line in lines for key in line.group.keys.values()}
    about_events = [
        "All methods of the event engine relative to synchronous SGD through a server: "
        f"{describe_signs(events, 'of synchronous', where[:3])}. Relative to the fastest blocking "
        f"method: {describe_signs(events, 'of fastest blocking', where[:3])}."
    ]
    neglected = [e.where for e in lines if e["on slow shard"].mean > 2 * e["training loss"].mean]
    redrawn = [e.where for e in lines if e["throughput"] > 1]
    return [
        *late("slow_workers.describe")(results.config, shown), PROVENANCE, TUNING, *signs,
        "All non-blocking forms relative to the fastest blocking method of the same dataset and "
        f"speeds: {describe_signs(free, 'of fastest blocking', where)}.",
        *(about_events if events else []),
        f"The fastest, in seconds: {targets.describe_fastest(lines, where[:2], 'seconds')}.",
        "Settings in which the loss on the examples of the slow worker is more than twice that on "
        f"all examples: {'; '.join(neglected) or 'none'}. Settings that finish more mini-batches "
        "than workers that never wait, by new times for long mini-batches: "
        f"{'; '.join(redrawn) or 'none'}.",
        targets.describe_missing(lines, "dataset"), CLAIMS, TABLE, FIGURES,
    ]  # fmt: skip


def mark(axes: Any, results: Results, keys: Mapping[str, str]) -> None:
    targets.mark(axes, results, {key: keys[key] for key in keys if key in KEYS})


STUDY = Study(
    "stragglers", Stragglers, late("slow_workers.settings"), late("slow_workers.train"), TIMES,
    prose, grid=grid, derive=derive, shares=(), headline=("seconds to target", "reached"),
    budget=lambda config: Budget(config.trials, config.trial_seeds), figures=[
        Lines(file=f"{column}_against_seconds.png", caption=f"{label} against simulated seconds",
              x=(Axis("seconds", "simulated seconds"),), y=Axis(column, label.lower()), at=None,
              by="strategy", across=("speeds",), down=("dataset", "family"), center="median",
              banded=lambda name: False, finish=finish, style=lambda number, name: LINES[name])
        for column, label, finish in (("train_loss", "Training loss", mark),
                                      ("test_loss", "Held-out loss", None))
    ],
    claims=[
        *[
            Claim(f"The non-blocking forms of {name} take {less} the blocking form to the target.",
                  judge(TIME, *limit, methods={"method": method}, log=True))
            for method, name in NAMES.items()
            for less, judge, *limit in (("less time than", is_better),
                                        ("at most half of the time of", is_no_worse, 0.5))
        ],
        Claim("Synchronous SGD of the event engine takes between 1 / 1.02 and 1.02 times the time "
              "of the blocking form of SGD.",
              is_equivalent(TIME, 1.02, methods={"method": "bulk_synchronous"},
                            reference=ALL_REDUCE, log=True)),
        *[
            Claim(f"{name[0].upper()}{name[1:]} takes less time than synchronous SGD through a "
                  "server.",
                  is_better(TIME, methods={"method": method}, reference=SYNCHRONOUS, log=True))
            for method, name in [*EVENTS.items()][2:]
        ],
        *[
            Claim(f"{EVENTS[method][0].upper()}{EVENTS[method][1:]} takes less time than "
                  f"{EVENTS[other]}.",
                  is_better(TIME, methods={"method": method}, reference={"method": other},
                            log=True))
            for method, other in (("staleness_aware", "parameter_server"), ("eamsgd", "easgd"))
        ],
    ],
)  # fmt: skip
