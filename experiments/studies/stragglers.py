"""How much time does training without waiting for slow workers save?"""

import dataclasses
import datetime
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from experiments.errors import select
from experiments.studies import _events as events
from experiments.studies import _windows as windows
from experiments.studies._events import STRATEGIES
from experiments.studies._windows import (
    FORMS,
    MAX_MINIBATCHES,
    METHODS,
    SLOW_WORKER,
    SPEEDS,
    WORKERS,
)
from experiments.study import targets
from experiments.study.claims import (
    Claim,
    Results,
    is_better,
    is_equivalent,
    is_no_worse,
)
from experiments.study.plot import COLORS, Axis, Lines
from experiments.study.record import Row
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
from experiments.study.statistics import mean
from experiments.study.table import (
    SEEDS,
    Column,
    Table,
    Value,
    compared_with,
    difference,
    fact_table,
    key,
    spread,
    tuned_beside,
)
from experiments.study.tuning import Grid, Values
from experiments.tasks.data import Dataset
from experiments.tasks.task import Task

KEYS = ("dataset", "speeds", "method", "form")
NAMES = {"all_reduce": "SGD", "dpsgd": "D-PSGD", "matcha": "MATCHA"}
BLOCKING, EVENTS, BY_LABEL = {"form": "blocking"}, "events", "digits_by_label"
ALL_REDUCE = {"method": "all_reduce", **BLOCKING}
SYNCHRONOUS = {"method": "synchronous_server", "form": EVENTS}
TIME = "seconds_to_target"
SPEEDS_OF = {  # Text takes longer to train. By label, it matters which worker is always slow.
    "digits": ("3:1", "exponential", "pareto", "sleep", "delay", "dead_slow"),
    BY_LABEL: ("3:1", "dead_slow"),
    "text": ("3:1", "pareto", "delay"),
}
TEXT_EXAMPLES = 8192  # The most for training, since each step orders the shards again.
SCORED_EXAMPLES = 400  # The most of the text, and of the shard of the slow worker.
TEXT_SECONDS = 0.75  # Over those of the digits.
FIRST_LOG = 0.02  # The part of a run before the first logged loss.
REFERENCE_SLOWDOWN = 3.0  # That of the speeds 3:1.
TRIAL_PART = 0.5  # Simulated time of a trial, as a part of a run's.


@dataclasses.dataclass(frozen=True)
class Stragglers(Options):
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

    seeds: int = 5
    """number of seeds"""
    trials: int = 10
    """points that the tuning of a setting tries"""
    seconds: float = 8.0
    """simulated seconds of a run; the text has three quarters of them"""
    points: int = 32
    """logged losses of a run"""
    datasets: tuple[str, ...] = ("all",)
    """digits, digits_by_label, text, or all"""
    speeds: tuple[str, ...] = ("all",)
    """such as 3:1 or dead_slow, or all"""
    methods: tuple[str, ...] = ("all",)
    """such as all_reduce or easgd, or all"""
    forms: tuple[str, ...] = ("all",)
    """blocking, abort_new_time, abort_same_time, finish_late, events, or all"""


def settings(config: Stragglers) -> list[Setting]:
    """The settings of the requested datasets, speeds, methods and forms.

    Raises:
      ExperimentError: If a name is unknown.
    """
    every = {"datasets": SPEEDS_OF, "speeds": SPEEDS, "methods": {**METHODS, **STRATEGIES},
             "forms": (*FORMS, EVENTS)}  # fmt: skip
    datasets, speeds, methods, forms = (
        select(getattr(config, name), [*names], f"--{name}") for name, names in every.items()
    )
    return [
        {"dataset": dataset, "speeds": speed, "method": method, "form": form}
        for dataset in datasets
        for speed in SPEEDS_OF[dataset]
        for method in methods
        for form in (windows.forms_of(method, speed) if method in METHODS else [EVENTS])
        if speed in speeds and form in forms
    ]


def facts(config: Stragglers, known: Sequence[Row]) -> list[Row]:
    """The date and the budget of tuning. Later runs of the record may have other ones."""
    budget = {"begun": datetime.date.today().isoformat(), "trials": config.trials,
              "part_of_the_time": TRIAL_PART,
              "logged_losses": config.points}  # fmt: skip
    places = dict.fromkeys((each["dataset"], each["speeds"]) for each in settings(config))
    recorded = {(each["dataset"], each["speeds"]) for each in known}
    return [{"about": "budget", "dataset": dataset, "speeds": speeds, **budget}
            for dataset, speeds in places if (dataset, speeds) not in recorded]  # fmt: skip


MINIBATCHES = {"minibatches": Values((1, 4), 1, MAX_MINIBATCHES)}
PERIOD = {"period": Values((4, 16), 1, 64)}
OWN = {
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
    "decoupled_diloco": {**PERIOD, "quorum": Values((4, 7), 1, WORKERS)},
}


def grid(config: Stragglers, setting: Setting) -> Grid:
    rates = (0.4, 1.6, 6.4) if setting["dataset"] == "text" else (0.1, 0.4, 1.6)
    return {"learning_rate": Values(rates), **OWN.get(setting["method"], MINIBATCHES)}


@functools.cache
def load(dataset: str) -> tuple[Task, Task]:
    """The task of a dataset, and that of trials, whose test set is a held-out part."""
    if dataset != "text":
        task = Task("digits")
        return task, task.hold_out()
    task = Task("text", window=16, scored_examples=SCORED_EXAMPLES)
    found = task, task.hold_out()
    most = (TEXT_EXAMPLES, TEXT_EXAMPLES, SCORED_EXAMPLES, SCORED_EXAMPLES)
    for each in found:
        arrays = zip(each.dataset, most, strict=False)
        each.dataset = Dataset(*[x[:: math.ceil(len(x) / size)] for x, size in arrays])
    return found


def make_shards(task: Task, seed: int, by_label: bool) -> tuple[np.ndarray, np.ndarray]:
    """Equal shards of the training set, [workers, examples, ...], random or sorted by label."""
    inputs, labels = task.dataset.train_inputs, task.dataset.train_labels
    each = len(inputs) // WORKERS
    order = np.random.default_rng(seed).permutation(len(inputs))[: each * WORKERS]
    if by_label:
        order = order[np.argsort(labels[order], kind="stable")]
    order = order.reshape(WORKERS, each)
    return inputs[order], labels[order]


def duration(config: Stragglers, setting: Setting) -> float:
    """The simulated seconds of a run.

    They are the same for all methods. Only methods that wait for all workers take longer if the
    slowdown is above that of 3:1, by the ratio of the two. So they take the same number of steps.
    """
    method, form, slowdown = setting["method"], setting["form"], SPEEDS[setting["speeds"]].slowdown
    waits = FORMS[form].waits if form in FORMS else STRATEGIES[method].waits
    longer = max(1.0, slowdown / REFERENCE_SLOWDOWN) if waits else 1.0
    return config.seconds * (TEXT_SECONDS if setting["dataset"] == "text" else 1.0) * longer


def train(config: Stragglers, _: Setting) -> Trainer:
    """The trainer of all settings, which share compiled programs."""

    def run(setting, seed, parameters, *, validation):
        dataset, speeds = setting["dataset"], SPEEDS[setting["speeds"]]
        task = load(dataset)[validation]
        shards = make_shards(task, seed, by_label=dataset == BY_LABEL)
        seconds = duration(config, setting) * (TRIAL_PART if validation else 1)
        times = np.geomspace(FIRST_LOG * seconds, seconds, config.points)
        family = windows if setting["method"] in METHODS else events
        states = family.run(setting, parameters, seed, load(dataset)[0], shards, times)
        logged = [jax.tree.map(lambda x, n=n: x[n], states) for n in range(len(states.step))]
        end = logged[-1]
        if validation:
            yield {"validation_loss": task.test_score(end.params)[0]}
            return
        points = [
            {"step": each.step, "seconds": each.seconds,
             "train_loss": task.train_score(each.params)[0],
             "test_loss": task.test_score(each.params)[0]}
            for each in logged
        ]  # fmt: skip
        yield from points
        shard = tuple(each[SLOW_WORKER][:SCORED_EXAMPLES] for each in shards)
        slow_loss = float(jax.jit(task.loss)(end.params, shard)) if speeds.slowdown > 1 else np.nan
        yield {
            **points[-1],
            "slow_shard_loss": slow_loss,
            "mean_staleness": end.staleness,
            "uploads": end.uploads,
        }

    return run


def derive(rows: Sequence[Row]) -> list[Row]:
    named = [
        row if row["kind"] == "fact" else {
            **row,
            "strategy": f"{row['method']} {row['form']}",
            "family": "windows" if row["form"] in FORMS else EVENTS,
        }
        for row in rows
    ]  # fmt: skip
    reference = {"speeds": "3:1", **ALL_REDUCE}
    return targets.add_targets(
        named, ("dataset",), reference, "train_loss", ("seconds",), interpolated=True
    )


def of_events(name: str) -> Value:
    """The mean over seeds of what only the runs of the event engine have."""
    return lambda group: mean([run.get(name, math.nan) for run in group.runs])


TIMES = Table(
    by=KEYS,
    columns=(
        *map(key, KEYS), SEEDS,
        Column("tuned", tuned_beside("strategy", "family")),
        Column("seconds to target", targets.needed("seconds"), ".2f"),
        Column("reached", targets.reached("seconds")),
        Column("of blocking", difference(TIME, log=True), targets.show_ratio),
        Column("of fastest blocking",
               targets.over_fastest("seconds", [{"method": each, **BLOCKING} for each in METHODS]),
               targets.show_ratio),
        Column("of synchronous", compared_with(difference(TIME, log=True), **SYNCHRONOUS),
               targets.show_ratio),
        Column("staleness", of_events("mean_staleness"), ".1f", hidden=True),
        Column("uploads", of_events("uploads"), ".2f", hidden=True),
        Column("on slow shard", spread("slow_shard_loss"), ".3f", hidden=True),
        Column("test loss", spread("test_loss"), ".3f"),
    ),
    reference=BLOCKING,
)  # fmt: skip

SIMULATED = (
    "8 simulated workers with equal shards of the training set, and plain SGD. The shards are "
    "random; those of `digits_by_label` are sorted by label, so that a worker has one label or "
    "two. A mini-batch has 16 examples and takes 10 ms on a fast worker. A link sends 12,500,000 "
    "bytes per second with 0.2 ms per message. Messages are sequential and do not overlap with "
    "computation; their bytes are those that `wire.account` reads from the program. In a "
    "non-blocking form, the signal of the fastest worker takes one more latency per window. All "
    "times are simulated; none is measured."
)
ABOUT_EVENTS = (
    "The methods of the form `events` have the mini-batches and their times in common with the "
    "windows, for every seed. A message to a server and its reply take a latency each, and "
    "their bytes over the bandwidth. Messages of several workers do not slow each other: the "
    "server is spread over them. The neighbors of `ad_psgd` send at the same time, and the one "
    "that is drawn does not wait. A gradient of `asy_lpg` has the time of two mini-batches, "
    "since it is evaluated at two points. One of all examples takes the time of the others, "
    "too, on the slowest worker, for which all wait. Options that are not tuned, such as the "
    "elasticity of EASGD and the outer optimizer of DiLoCo, have the values that the papers "
    "recommend. D-ADMM and its Jacobi form are not among the methods: in each event, a worker "
    "minimizes its own loss exactly, and that of a network has no closed form. LAG-PS needs to "
    "know how smooth the loss of each worker is."
)
TARGET = (
    "With `dead_slow`, only methods that wait for all take 33 times as long: they take one step "
    "per second, and would finish a few steps only. The target of a dataset is the mean training "
    "loss of the tuned blocking all-reduce after half of its run, with the speeds 3:1. The rule "
    "was stated before the runs. The end of the run would be no target: about half of the seeds "
    "of the reference would not reach it. A run that never reaches the target, or diverges, "
    "counts as slower than every other."
)
TUNED = (
    "Each form of each method is tuned on a held-out fifth of the training set, by the loss after "
    "a part of the simulated time: the learning rate, and the mini-batches per worker and step (1 "
    "to 8), or the parameters of the method. All methods with the same dataset and speeds have the "
    "same budget of tuning. A record may join runs of several dates, and have fewer points than "
    "were logged, all of those that the target depends on among them:"
)
COLUMNS = (
    "Columns: `of blocking` is the time to the target over that of the blocking form of the same "
    "method, as a geometric mean over paired seeds with a 95 % interval; `of fastest blocking` is "
    "over the blocking method with the least mean, and `of synchronous` over `synchronous_server`. "
    "`staleness` is the mean number of events of other workers since a gradient began, and "
    "`uploads` that of messages per gradient. `on slow shard` is the final training loss on the "
    "examples of the slowest worker. ± is the standard deviation over seeds."
)


def prose(results: Results) -> list[str]:
    lines, seconds = results.lines, results.config.seconds
    shown = {name for line in lines for name in line.group.keys.values()}
    described = {name: each.description for names in (SPEEDS, METHODS, FORMS)
                 for name, each in names.items()}  # fmt: skip
    described |= {name: f"{each.name}: {each.description}" for name, each in STRATEGIES.items()}
    described[EVENTS] = (
        "every gradient is an event of its own, after which the method decides what it changes "
        "and which workers go on"
    )
    return [
        SIMULATED,
        "Slow workers, methods and forms:",
        "\n".join(f"- `{name}`: {text}." for name, text in described.items() if name in shown),
        ABOUT_EVENTS if EVENTS in shown else "",
        f"Every run takes the same simulated time, {seconds:g} seconds, or "
        f"{TEXT_SECONDS * seconds:g} for the text. {TARGET}",
        TUNED, fact_table(results.rows, "budget"), COLUMNS, PROVENANCE, TUNING,
        f"The fastest, in seconds: {targets.describe_fastest(lines, KEYS[:2], 'seconds')}.",
        targets.describe_missing(lines, "dataset"), CLAIMS, TABLE, FIGURES,
    ]  # fmt: skip


def mark(axes: Any, results: Results, keys: Setting) -> None:
    targets.mark(axes, results, {key: keys[key] for key in keys if key in KEYS})


def style(_: int, name: str) -> Setting:
    """A color per method; the line is of the form, and dashed for the last methods of events."""
    method, form = name.split()
    number = [*METHODS, *STRATEGIES].index(method)
    lines = {"blocking": "--", "abort_new_time": "-.", "finish_late": ":"}
    return {"color": COLORS[number % 7], "linestyle": lines.get(form, "-" if number < 11 else "--")}


def is_sooner(method: str, reference: Setting) -> Any:
    """The judge of the claim that a method takes less time than the reference."""
    return is_better(TIME, methods={"method": method}, reference=reference, log=True)


STRAGGLERS = Study(
    "stragglers", Stragglers, settings, train, TIMES, prose, grid=grid, derive=derive, facts=facts,
    shares=(),
    budget=lambda config: config.trials, figures=[
        Lines(file=f"{column}_against_seconds.png", caption=f"{label} against simulated seconds",
              x=(Axis("seconds", "simulated seconds"),), y=Axis(column, label.lower()), at=None,
              by="strategy", across=("speeds",), down=("dataset", "family"), center=np.median,
              banded=lambda name: False, finish=finish, style=style)
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
            Claim(f"{strategy.name} takes less time than synchronous SGD through a server.",
                  is_sooner(method, SYNCHRONOUS))
            for method, strategy in [*STRATEGIES.items()][2:]
        ],
        *[
            Claim(f"{STRATEGIES[method].name} takes less time than {other_name}.",
                  is_sooner(method, {"method": other}))
            for method, other, other_name in (
                ("staleness_aware", "parameter_server", "asynchronous SGD"),
                ("eamsgd", "easgd", "EASGD"),
            )
        ],
    ],
)  # fmt: skip
