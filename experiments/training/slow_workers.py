"""Runs of the study of stragglers: training for a simulated time, with logged losses."""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.cli.choices import select
from experiments.cli.errors import ExperimentError
from experiments.methods.policies import EVENTS, FORM, STRATEGIES
from experiments.methods.stragglers import (
    BLOCKING,
    FORMS,
    METHODS,
    SLOW_WORKER,
    SPEEDS,
    WORKERS,
    forms_of,
)
from experiments.tasks.task import Task
from experiments.training import event_runs, window_runs
from experiments.training.logged import Logged, Training
from experiments.training.timeline import MAX_MINIBATCHES
from experiments.training.windows import make_shards

BY_LABEL = "digits_by_label"
TASKS: dict[str, dict[str, int]] = {
    "digits": {},
    "text": {"window": 16, "scored_examples": 400},
}
SPEEDS_OF = {  # Text takes longer to train. By label, it matters which worker is always slow.
    "digits": ("3:1", "exponential", "pareto", "sleep", "delay", "dead_slow"),
    BY_LABEL: ("3:1", "dead_slow"),
    "text": ("3:1", "pareto", "delay"),
}
TEXT_EXAMPLES = 8192  # The most for training, since each step orders the shards again.
SCORED_EXAMPLES = 400  # The most of the test set of the text, and of a worker's shard.
FIRST_LOG = 0.02  # The part of it before the first logged loss.
REFERENCE_SLOWDOWN = 3.0  # That of the speeds 3:1.


_ABOUT_EVENTS = (
    "The methods of the form `events` have the mini-batches and their times in common with the "
    "windows, for every seed. A message to a server and its reply take a latency each, and "
    "their bytes over the bandwidth. Messages of several workers do not slow each other: the "
    "server is spread over them. The neighbors of `ad_psgd` send at the same time, and the one "
    "that is drawn does not wait. A gradient of `asy_lpg` has the time of two mini-batches, "
    "since it is evaluated at two points. One of all examples takes the time of the others, "
    "too, on the slowest worker, for which all wait. The learning rate of `parameter_server` "
    f"is divided by {WORKERS}, so that it is that of a gradient of each worker. Options that are "
    "not tuned, such as the elasticity of EASGD and the outer optimizer of DiLoCo, have the "
    "values that the papers recommend. D-ADMM and its Jacobi form are not among the methods: "
    "in each event, a worker minimizes its own loss exactly, and that of a network has no "
    "closed form. LAG-PS needs to know how smooth the loss of each worker is."
)


class Family(NamedTuple):
    """Methods that are trained in the same way."""

    forms: Callable[[str, str], list[str]]  # of a method and speeds
    waits: Callable[[str, str], bool]  # whether a dead worker stops the others, by method and form
    run: Callable[[Training], Iterator[Logged]]


_WINDOWS = Family(forms_of, lambda method, form: form == BLOCKING, window_runs.run)
_EVENTS = Family(
    lambda method, speeds: [EVENTS],
    lambda method, form: STRATEGIES[method].waits,
    event_runs.run,
)
FAMILIES = {**dict.fromkeys(METHODS, _WINDOWS), **dict.fromkeys(STRATEGIES, _EVENTS)}


@functools.cache
def load(dataset: str, *, validation: bool) -> Task:
    """The task of a dataset; for the tuning, with a held-out part as its test set."""
    if dataset == BY_LABEL:
        return load("digits", validation=validation)
    task = Task(dataset, **TASKS[dataset])
    task = task.hold_out() if validation else task
    if dataset == "text":
        data = task.dataset
        train = math.ceil(len(data.train_inputs) / TEXT_EXAMPLES)
        test = math.ceil(len(data.test_inputs) / SCORED_EXAMPLES)
        task.dataset = data._replace(
            train_inputs=data.train_inputs[::train], train_labels=data.train_labels[::train],
            test_inputs=data.test_inputs[::test], test_labels=data.test_labels[::test],
        )  # fmt: skip
    return task


def settings(config: Any) -> list[dict[str, str]]:
    """The settings of the requested datasets, speeds, methods and forms.

    Raises:
      ExperimentError: If a name is unknown, or a worker has fewer examples than a mini-batch.
    """
    requested = [
        select(getattr(config, name), [*available], f"--{name}")
        for name, available in (
            ("datasets", SPEEDS_OF), ("speeds", SPEEDS), ("methods", FAMILIES),
            ("forms", (*FORMS, EVENTS)),
        )
    ]  # fmt: skip
    datasets, speeds, methods, forms = requested
    for dataset in datasets:
        each = len(load(dataset, validation=True).dataset.train_inputs) // WORKERS
        if config.minibatch_size > each:
            raise ExperimentError(
                f"--minibatch-size {config.minibatch_size} exceeds the {each} examples of a worker."
            )
    found = [
        {"dataset": dataset, "speeds": speed, "method": method, "form": form}
        for dataset in datasets
        for speed in SPEEDS_OF[dataset]
        for method in methods
        for form in FAMILIES[method].forms(method, speed)
        if speed in speeds and form in forms
    ]
    if not found:
        raise ExperimentError("No requested dataset has one of the --speeds and --forms.")
    return found


def duration(config: Any, setting: Mapping[str, Any]) -> float:
    """The simulated seconds of a run.

    They are the same for all methods. Only methods that wait for all workers take longer if the
    slowdown is above that of 3:1, by the ratio of the two. So they take the same number of steps.
    """
    seconds = config.text_seconds if setting["dataset"] == "text" else config.seconds
    slowdown = SPEEDS[setting["speeds"]].slowdown
    waits = FAMILIES[setting["method"]].waits(setting["method"], setting["form"])
    if waits and slowdown > REFERENCE_SLOWDOWN:
        seconds *= slowdown / REFERENCE_SLOWDOWN
    return seconds


class Trainer:
    """Trains any setting; programs are shared by all of them."""

    def __init__(self, config: Any):
        """Compiles nothing."""
        self.config = config

    def __call__(
        self, setting: Mapping[str, Any], seed: int, parameters: Mapping[str, Any], *,
        validation: bool,
    ) -> Iterator[dict[str, Any]]:  # fmt: skip
        """Trains once; see `experiments.study.study.Trainer`."""
        config, dataset = self.config, setting["dataset"]
        task, speeds = load(dataset, validation=validation), SPEEDS[setting["speeds"]]
        seconds = duration(config, setting) * (config.trial_part if validation else 1)
        logged = np.geomspace(FIRST_LOG * seconds, seconds, config.points)
        shards = make_shards(task, seed, by_label=dataset == BY_LABEL)
        training = Training(
            config, setting, parameters, seed, task, shards, seconds,
            logged=logged[-1:] if validation else logged,
        )  # fmt: skip
        for now in FAMILIES[setting["method"]].run(training):
            if validation:
                yield {"validation_loss": task.test_score(now.params)[0]}
                return
            test_loss, accuracy = task.test_score(now.params)
            point = {
                "step": now.step,
                "seconds": now.seconds,
                "finished": now.finished,
                "train_loss": task.train_score(now.params)[0],
                "test_loss": test_loss,
            }
            yield point
        means = speeds.straggler(config.minibatch_seconds).means(WORKERS)
        shard = jax.tree.map(lambda x: x[SLOW_WORKER][:SCORED_EXAMPLES], shards)
        slow_loss = float(jax.jit(task.loss)(now.params, shard))
        yield {
            **point,
            "test_accuracy": accuracy,
            "slow_shard_loss": slow_loss if speeds.slowdown > 1 else math.nan,
            "throughput": now.finished / now.clock / np.sum(1 / means),
            "aborted": now.aborted / (WORKERS * now.clock),
            "mean_staleness": now.staleness,
            "uploads": now.uploads,
        }


def train(config: Any, setting: Mapping[str, Any]) -> Trainer:
    """The trainer of all settings."""
    del setting
    return Trainer(config)


def describe(config: Any, shown: Collection[str]) -> list[str]:
    """What is simulated, for a README.

    Args:
      config: The config.
      shown: The speeds, methods and forms that the record has.
    """
    part = {0.5: "half", 1: "all"}.get(config.trial_part, f"{config.trial_part:.0%}")
    legend = [
        f"- `{name}`: {getattr(of, 'description', of)}."
        for names in (SPEEDS, METHODS, STRATEGIES, FORMS, {EVENTS: FORM})
        for name, of in names.items()
        if name in shown
    ]
    return [
        f"{WORKERS} simulated workers with equal shards of the training set, and plain SGD. The "
        f"shards are random; those of `{BY_LABEL}` are sorted by label, so that a worker has one "
        f"label or two. A mini-batch has {config.minibatch_size} examples and takes "
        f"{1e3 * config.minibatch_seconds:g} ms on a fast worker. A link sends "
        f"{config.bandwidth:,.0f} bytes per second with {1e3 * config.latency:g} ms per message. "
        "Messages are sequential and do not overlap with computation; their bytes are those that "
        "`wire.account` reads from the program. In a non-blocking form, the signal of the fastest "
        "worker takes one more latency per window. All times are simulated; none is measured.",
        "Slow workers, methods and forms:",
        "\n".join(legend),
        *([_ABOUT_EVENTS] if EVENTS in shown else []),
        f"Every run takes the same simulated time, {config.seconds:g} seconds, or "
        f"{config.text_seconds:g} for the text. With `dead_slow`, only methods that wait for all "
        f"take {SPEEDS['dead_slow'].slowdown / REFERENCE_SLOWDOWN:.0f} times as long: they take "
        "one step per second, and would finish a few steps only. The target of a dataset is the "
        "mean training loss of the tuned blocking all-reduce after half of its run, with the first "
        "speeds of the table. The rule was stated before the runs. The end of the run would be no "
        "target: about half of the seeds of the reference would not reach it. A run that never "
        "reaches the target, or diverges, counts as slower than every other.",
        "Each form of each method is tuned on a held-out fifth of the training set, by the loss "
        f"after {part} of the simulated time: the learning rate, and the mini-batches per worker "
        f"and step (1 to {MAX_MINIBATCHES}), or the parameters of the method. An earlier record "
        "fixed 4 mini-batches per step for all forms. That was unfair to the blocking forms, which "
        "waited for 4 mini-batches where they are faster with one.",
        "Columns: `of blocking` is the time to the target over that of the blocking form of the "
        "same method, as a geometric mean over paired seeds with a 95 % interval; `of fastest "
        "blocking` is over the blocking method with the least mean, and `of synchronous` over "
        "`synchronous_server`. Throughput is that of finished mini-batches, over that of workers "
        "that never wait or send. `aborted %` is the share of all workers' time that went into "
        "mini-batches that a window threw away. `staleness` is the mean number of events of other "
        "workers since a gradient began, and `uploads` that of messages per gradient. `on slow "
        "shard` is the final training loss on the examples of the slowest worker. ± is the "
        "standard deviation over seeds. P-values are not corrected for the number of settings.",
    ]
