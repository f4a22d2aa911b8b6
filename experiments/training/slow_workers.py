"""Runs of the study of stragglers: training for a simulated time, with logged losses."""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from experiments.cli.choices import select
from experiments.cli.errors import ExperimentError
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
from experiments.training.timeline import MAX_MINIBATCHES, Link, timeline
from experiments.training.windows import Program, make_shards

BY_LABEL = "digits_by_label"
TASKS: dict[str, dict[str, int]] = {
    "digits": {},
    "text": {"window": 16, "scored_examples": 400},
}
SPEEDS_OF = {  # Text takes longer to train. By label, it matters which worker is always slow.
    "digits": ("3:1", "exponential", "pareto", "delay", "dead_slow"),
    BY_LABEL: ("3:1", "dead_slow"),
    "text": ("3:1", "pareto", "delay"),
}
TEXT_EXAMPLES = 8192  # The most for training, since each step orders the shards again.
SCORED_EXAMPLES = 400  # The most of the test set of the text, and of a worker's shard.
FIRST_LOG = 0.02  # The part of it before the first logged loss.
REFERENCE_SLOWDOWN = 3.0  # That of the speeds 3:1.


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
            ("datasets", SPEEDS_OF), ("speeds", SPEEDS), ("methods", METHODS), ("forms", FORMS)
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
        for form in forms_of(method, speed)
        if speed in speeds and form in forms
    ]
    if not found:
        raise ExperimentError("No requested dataset has one of the --speeds and --forms.")
    return found


@functools.cache
def _program(task: Task, method: str, minibatch_size: int) -> Program:
    return Program(task, METHODS[method], minibatch_size)


@functools.cache
def _link(task: Task, method: str, bandwidth: float, latency: float) -> Link:
    return _program(task, method, 1).link(bandwidth, latency)


def duration(config: Any, setting: Mapping[str, Any]) -> float:
    """The simulated seconds of a run.

    They are the same for all methods. Only blocking forms with a slowdown above that of 3:1 take
    longer, by the ratio of the two, so that they take the same number of steps.
    """
    seconds = config.text_seconds if setting["dataset"] == "text" else config.seconds
    slowdown = SPEEDS[setting["speeds"]].slowdown
    if setting["form"] == BLOCKING and slowdown > REFERENCE_SLOWDOWN:
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
        config, dataset, method = self.config, setting["dataset"], setting["method"]
        speeds = SPEEDS[setting["speeds"]]
        task = load(dataset, validation=validation)
        minibatches = parameters.get("minibatches", 1)
        seconds = duration(config, setting) * (config.trial_part if validation else 1)
        when = timeline(
            method,
            setting["form"],
            setting["speeds"],
            _link(load(dataset, validation=False), method, config.bandwidth, config.latency),
            seconds=seconds,
            minibatch_seconds=config.minibatch_seconds,
            minibatches=minibatches,
            period=parameters.get("period", 1),
            seed=seed,
        )
        steps = len(when.seconds)
        logged = np.geomspace(FIRST_LOG * seconds, seconds, config.points)
        found = np.searchsorted(when.seconds, logged, side="right")
        stops = [steps] if validation else [*np.unique([*found[found > 0], steps])]
        # Gossip sums over mini-batches, and the others take their mean.
        rate = parameters["learning_rate"] / (minibatches if METHODS[method].mixing else 1)
        shards = make_shards(task, seed, by_label=dataset == BY_LABEL)
        program = _program(task, method, config.minibatch_size)
        finished = when.window.finished.sum(axis=1).cumsum()
        trained = program.train(when, stops, shards, rate, parameters.get("period", 1), seed)
        for step, params in zip(stops, trained, strict=True):
            if validation:
                yield {"validation_loss": task.test_score(params)[0]}
                return
            loss, (test_loss, accuracy) = task.train_score(params)[0], task.test_score(params)
            point = {
                "step": step,
                "seconds": when.seconds[step - 1],
                "finished": finished[step - 1],
                "train_loss": loss,
                "test_loss": test_loss,
            }
            yield point
        means = speeds.straggler(config.minibatch_seconds).means(WORKERS)
        shard = jax.tree.map(lambda x: x[SLOW_WORKER][:SCORED_EXAMPLES], shards)
        slow_loss = float(jax.jit(task.loss)(params, shard))
        yield {
            **point,
            "test_accuracy": accuracy,
            "slow_shard_loss": slow_loss if speeds.slowdown > 1 else math.nan,
            "throughput": finished[-1] / when.seconds[-1] / np.sum(1 / means),
            "aborted": when.aborted[-1] / (WORKERS * when.seconds[-1]),
        }


def train(config: Any, setting: Mapping[str, Any]) -> Trainer:
    """The trainer of all settings."""
    del setting
    return Trainer(config)


def describe(config: Any) -> list[str]:
    """What is simulated, for a README."""
    part = {0.5: "half", 1: "all"}.get(config.trial_part, f"{config.trial_part:.0%}")
    legend = [
        f"- `{name}`: {getattr(of, 'description', of)}."
        for names in (SPEEDS, METHODS, FORMS)
        for name, of in names.items()
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
        f"Every run takes the same simulated time, {config.seconds:g} seconds, or "
        f"{config.text_seconds:g} for the text. Only blocking forms with `dead_slow` take "
        f"{SPEEDS['dead_slow'].slowdown / REFERENCE_SLOWDOWN:.0f} times as long: they take one "
        "step per second, and would finish a few steps only. The target of a dataset is the mean "
        "training loss of the tuned blocking all-reduce after half of its run, with the first "
        "speeds of the table. The rule was stated before the runs. The end of the run would be no "
        "target: about half of the seeds of the reference would not reach it. A run that never "
        "reaches the target, or diverges, counts as slower than every other.",
        "Each form of each method is tuned on a held-out fifth of the training set, by the loss "
        f"after {part} of the simulated time: the learning rate, and the mini-batches per worker "
        f"and step (1 to {MAX_MINIBATCHES}), or the period of local SGD. An earlier record fixed 4 "
        "mini-batches per step for all forms. That was unfair to the blocking forms, which waited "
        "for 4 mini-batches where they are faster with one.",
        "Columns: `of blocking` is the time to the target over that of the blocking form of the "
        "same method, as a geometric mean over paired seeds with a 95 % interval; `of fastest "
        "blocking` is over the blocking method with the least mean. Throughput is that of finished "
        "mini-batches, over that of workers that never wait or send. `aborted %` is the share of "
        "all workers' time that went into mini-batches that were thrown away. `on slow shard` is "
        "the final training loss on the examples of the slowest worker. ± is the standard "
        "deviation over seeds. P-values are not corrected for the number of settings.",
    ]
