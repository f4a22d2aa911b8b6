"""What the lab measures: settings, and measurements between two of a control."""

import atexit
import functools
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.cli.choices import select
from experiments.cli.errors import ExperimentError
from experiments.lab import words
from experiments.lab.methods import CONTROL, LABELS, LabMethod, find
from experiments.lab.network import UNSHAPED, Link, Network, bits_per_second, check_delay
from experiments.lab.peers import METHODS, require_torch
from experiments.lab.processes import FIRST_PORT, Group
from experiments.lab.words import MODEL as WORDS
from experiments.methods import expand
from experiments.methods.sparse import SPARSE_METHODS, Capacity
from experiments.training.densities import measure_densities

PEERS = tuple(METHODS)
RACE = (
    *("mean", "plain_jax_psum", "mean_bfloat16", "global_qsgd:8", "two_stage:4"),
    *("ef_top_1_percent", "power_sgd_rank_1", "power_sgd_rank_4"),
    *("ddp", "ddp_fp16", "ddp_power_sgd_1", "ddp_power_sgd_4"),
)
PRESETS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "race": (RACE, ("1gbit", "200mbit", "100mbit")),
    "full": ((*LABELS[2:], *PEERS), ("1gbit", "200mbit", "100mbit", "20mbit")),
}
LEARNING_RATE = 1e-3
CONTROL_STEPS = 16
CALIBRATION = 20  # Batches that measure the densities of the model `words`.
RECENT_SECONDS = 1.0


def labels(config: Any) -> list[str]:
    """The methods of a config, and the control."""
    if config.model == WORDS:
        return [CONTROL, *select(config.methods or ("all",), [*SPARSE_METHODS], "--methods")]
    chosen = config.methods
    if not chosen:
        chosen = PRESETS[config.preset][0]
        if importlib.util.find_spec("torch") is None:
            chosen = [name for name in chosen if name not in PEERS]
    return [CONTROL, *(name for name in expand(chosen, (*LABELS, *PEERS)) if name != CONTROL)]


def links(config: Any) -> list[Link]:
    """The links of a config; first the unshaped one."""
    rates = config.bandwidth or (PRESETS[config.preset][1] if not config.between else ())
    found = [Link(), *(Link(rate) for rate in rates), *(Link(rate, 2) for rate in config.between)]
    return list(dict.fromkeys(found))


def _find(config: Any, name: str) -> LabMethod:
    """The method of a name; of the model `words` without its capacities."""
    return words.find(name, 0, {}) if config.model == WORDS else find(name)


def capacities(workers: int) -> dict[str, Capacity]:
    """The capacity for each sparse leaf of the model `words`, from measured densities."""
    params = words.task().first_weights(0)
    leaves = measure_densities(words.task(), workers, params, words.batches(workers, CALIBRATION))
    return {leaf.leaf: leaf.capacity for leaf in leaves if leaf.is_sparse}


@functools.cache
def settings(config: Any) -> Sequence[Mapping[str, Any]]:
    """Every method on every link.

    Raises:
      ExperimentError: If an option is invalid, or PyTorch is required and not installed.
    """
    if config.workers < 2:
        raise ExperimentError("--workers must be at least 2.")
    if config.between and config.workers % 2:
        raise ExperimentError(f"--between needs an even number of workers, got {config.workers}.")
    check_delay(config.delay)
    names = labels(config)
    for name in names:
        require_torch() if name in PEERS else _find(config, name)
    flat = [name for name in names if name in PEERS or not _find(config, name).clusters]
    return [
        {"link": link.name, "method": name}
        for link in links(config)
        for name in (
            names if (config.between and link.rate == UNSHAPED) or link.clusters == 2 else flat
        )
    ]


class Limits(NamedTuple):
    """The limits of a measurement.

    Attributes:
      steps: The largest number of timed steps.
      seconds: The time limit.
      drift: The largest change of the control.
      attempts: The number of attempts; the last one counts.
    """

    steps: int
    seconds: float
    drift: float
    attempts: int


def steps_of(limits: Limits, period: int, seconds: float) -> int:
    """The timed steps: whole periods within the limits, at least one, if a step takes `seconds`."""
    most = min(limits.steps, math.floor(limits.seconds / seconds))
    return period * max(1, most // period)


def milliseconds_of(answers: Sequence[Mapping[str, Any]], period: int) -> float:
    """The median over periods of the milliseconds per step of the slowest worker."""
    times = np.array([answer["milliseconds"] for answer in answers])  # [workers, steps]
    periods = times.reshape(len(times), -1, period).mean(axis=2)
    return float(np.median(periods.max(axis=0)))


class Lab:
    """The network and the workers of both frameworks, which stay for all measurements."""

    def __init__(self, config: Any, model: str, optimizer: str = "sgd"):
        """Builds the network; workers start when they are needed."""
        self._config, self._optimizer = config, optimizer
        self._arguments: dict[str, Any] = {"model": model, "seed": 0}
        if model == WORDS:
            self._arguments["capacities"] = capacities(config.workers)
        self.network = Network(config.workers, config.delay)
        self._groups: dict[tuple[str, bool], Group] = {}
        self._prepared: dict[str, Mapping[str, Any]] = {}
        self._last_control = (-math.inf, math.nan)  # When it ended, and its milliseconds.
        atexit.register(self.close)

    def close(self) -> None:
        """Ends all workers."""
        for group in self._groups.values():
            group.close()

    def group(self, method: str) -> Group:
        """The workers that run a method."""
        framework = "torch" if method in PEERS else "jax"
        keeps_memory = framework == "jax" or METHODS[method].keeps_memory
        if (framework, keeps_memory) not in self._groups:
            self._groups[framework, keeps_memory] = Group(
                framework,
                self._config.workers,
                self._config.threads,
                self._arguments,
                keeps_memory=keeps_memory,
                port=FIRST_PORT + len(self._groups),
            )
        return self._groups[framework, keeps_memory]

    def prepare(self, method: str) -> Mapping[str, Any]:
        """Compiles the step of a method, on an unshaped link."""
        if method not in self._prepared:
            before = self.network.link
            self.network.shape(Link())
            self._prepared[method] = self.group(method).ask(
                "prepare", method=method, learning_rate=LEARNING_RATE, optimizer=self._optimizer
            )[0]
            self.network.shape(before)
        return self._prepared[method]

    def measure(self, method: str, steps: int, warm_up: int) -> list[dict[str, Any]]:
        """Measures steps on the present link."""
        arguments = {"method": method, "steps": steps, "warm_up": warm_up}
        return self.group(method).ask("measure", seconds=1800, **arguments)

    def control(self) -> float:
        """Milliseconds of a step without communication."""
        self.prepare(CONTROL)
        milliseconds = milliseconds_of(self.measure(CONTROL, CONTROL_STEPS, 2), 1)
        self._last_control = time.monotonic(), milliseconds
        return milliseconds

    def recent_control(self) -> float:
        """The last control if it has just ended, as after a measurement; otherwise a new one."""
        ended, milliseconds = self._last_control
        is_recent = time.monotonic() - ended < RECENT_SECONDS
        return milliseconds if is_recent else self.control()

    def time_steps(self, method: str, link: Link, period: int, limits: Limits) -> dict[str, Any]:
        """Measures steps on a link between two measurements of the control, until it is steady.

        Args:
          method: The method.
          link: The link.
          period: The steps after which what is sent repeats.
          limits: The limits.

        Returns:
          The values of a row: `milliseconds` per step, `control`, `is_steady`, `rejected`, `steps`,
          and bytes `sent` per step, the `loss` of the last step, and bytes `accounted` if known.
        """
        accounted = self.prepare(method).get("accounted")
        self.network.shape(link)
        rejected, is_steady = 0, False
        while not is_steady and rejected < limits.attempts:
            before = self.recent_control()
            took = milliseconds_of(self.measure(method, period, period), period)
            steps = steps_of(limits, period, took / 1e3)
            answers = self.measure(method, steps, 0)
            after = self.control()
            is_steady = abs(after / before - 1) <= limits.drift
            rejected += not is_steady
        found: dict[str, Any] = {
            "milliseconds": milliseconds_of(answers, period),
            "control": statistics.mean((before, after)),
            "is_steady": is_steady,
            "rejected": rejected,
            "steps": steps,
            "sent": statistics.mean(answer["sent"] / steps for answer in answers),
            "loss": statistics.mean(answer["losses"][-1] for answer in answers),
        }
        return found if accounted is None else {**found, "accounted": accounted}


@functools.cache
def _lab(config: Any) -> Lab:
    return Lab(config, config.model)


def train(config: Any, setting: Mapping[str, str]) -> Callable[..., Iterator[Mapping[str, Any]]]:
    """The trainer of one method on one link."""
    (link,) = (link for link in links(config) if link.name == setting["link"])
    name, lab, rate = setting["method"], _lab(config), bits_per_second(link.rate)
    period = 1 if name in PEERS else _find(config, name).period
    limits = Limits(config.steps, config.seconds, config.drift, config.attempts)

    def trainer(
        setting: Mapping[str, str], seed: int, parameters: Mapping[str, Any], **_: Any
    ) -> Iterator[Mapping[str, Any]]:
        found = lab.time_steps(name, link, period, limits)
        if link.rate != UNSHAPED and link.clusters == 1:
            yield {"megabits": rate / 1e6, "milliseconds": found["milliseconds"]}
        yield found

    return trainer
