"""Runs of the methods of windows, which all workers end together."""

import functools
from collections.abc import Iterator

import numpy as np

from experiments.methods.stragglers import METHODS
from experiments.tasks.task import Task
from experiments.training.logged import Logged, Training
from experiments.training.timeline import Link, timeline
from experiments.training.windows import Program


@functools.cache
def _program(task: Task, method: str, minibatch_size: int) -> Program:
    return Program(task, METHODS[method], minibatch_size)


@functools.cache
def link_of(task: Task, method: str, bandwidth: float, latency: float) -> Link:
    """The seconds of communication of a method."""
    return _program(task, method, 1).link(bandwidth, latency)


def run(training: Training) -> Iterator[Logged]:
    """Trains; yields the ends of the last windows before the logged times, and at least one."""
    config, setting, parameters = training.config, training.setting, training.parameters
    method, seed = setting["method"], training.seed
    minibatches, period = parameters.get("minibatches", 1), parameters.get("period", 1)
    when = timeline(
        method,
        setting["form"],
        setting["speeds"],
        link_of(training.task, method, config.bandwidth, config.latency),
        seconds=training.seconds,
        minibatch_seconds=config.minibatch_seconds,
        minibatches=minibatches,
        period=period,
        seed=seed,
    )
    steps = len(when.seconds)
    found = np.searchsorted(when.seconds, training.logged, side="right")
    stops = [*np.unique([*found[found > 0], steps])]
    # Gossip sums over mini-batches, and the others take their mean.
    rate = parameters["learning_rate"] / (minibatches if METHODS[method].mixing else 1)
    program = _program(training.task, method, config.minibatch_size)
    finished = when.window.finished.sum(axis=1).cumsum()
    trained = program.train(when, stops, training.shards, rate, period, seed)
    for step, params in zip(stops, trained, strict=True):
        seconds = when.seconds[step - 1]
        yield Logged(params, step, seconds, seconds, finished[step - 1], when.aborted[step - 1])
