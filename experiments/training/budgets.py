"""Training with one slow link: what is learned in a step, and how long the links take."""

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from experiments.cli.choices import select
from experiments.cli.errors import ExperimentError
from experiments.tasks.task import Task
from jaxcomm.compression import blockwise
from jaxcomm.compression.quantizers import dither
from jaxcomm.wire._account import Account

BLOCK = 64


def _bits(bits: int) -> jaxcomm.Codec:
    return blockwise(dither(levels=2 ** (bits - 1) - 1), BLOCK)


def _equal(bits: int, of_mean: int) -> Callable[[Any], optax.GradientTransformation]:
    return lambda seed: jaxcomm.two_stage_mean(_bits(bits), mean_codec=_bits(of_mean), seed=seed)


def _budgeted(slow: int, of_mean: int) -> Callable[[Any], optax.GradientTransformation]:
    return lambda seed: jaxcomm.budgeted_mean(
        _bits, 8, slow={0: slow}, mean_codec=_bits(of_mean), seed=seed
    )


METHODS: Mapping[str, tuple[Callable[[Any], optax.GradientTransformation], str]] = {
    "mean": (lambda seed: jaxcomm.mean(), "all workers send float32"),
    "equal_8": (_equal(8, 8), "all workers send 8 bits, and the mean has 8 bits"),
    "equal_8_4": (_equal(8, 4), "all workers send 8 bits, and the mean has 4 bits"),
    "equal_2_4": (_equal(2, 4), "all workers send 2 bits, and the mean has 4 bits"),
    "slow_2_8": (_budgeted(2, 8), "the slow worker sends 2 bits, others 8, and the mean has 8"),
    "slow_2_4": (_budgeted(2, 4), "the slow worker sends 2 bits, others 8, and the mean has 4"),
}


def seconds_of(account: Account, workers: int, slowdown: float, bandwidth: float) -> float:
    """The seconds of a step's messages, one stage after the other.

    A stage is all collectives of one kind. It ends when the slowest link has moved the bytes that
    its worker sends and receives at the same time. The link of worker 0 is slower.
    """
    total = 0.0
    for kind in {each.primitive for each in account.collectives}:
        of_stage = [each for each in account.collectives if each.primitive == kind]
        total += max(
            max(
                sum(each.bytes_sent(worker) for each in of_stage),
                sum(each.bytes_received(worker) for each in of_stage),
            )
            * (slowdown if worker == 0 else 1)
            / bandwidth
            for worker in range(workers)
        )
    return total


def settings(config: Any) -> Sequence[Mapping[str, Any]]:
    """All methods with all slow links.

    Raises:
      ExperimentError: If a method does not exist, or a number is out of range.
    """
    methods = select(config.methods, [*METHODS], "--methods")
    if config.batch % config.workers:
        raise ExperimentError(
            f"--batch {config.batch} is not divisible by --workers {config.workers}."
        )
    if config.workers < 2:
        raise ExperimentError(f"--workers must be at least 2, got {config.workers}.")
    if low := [each for each in config.slowdowns if each < 1]:
        raise ExperimentError(f"--slowdowns must be at least 1, got {low[0]:g}.")
    if config.steps % (2 * config.log_every):
        raise ExperimentError(
            f"--steps {config.steps} is not divisible by twice --log-every {config.log_every}."
        )
    return [
        {"slowdown": slowdown, "method": method}
        for method in methods
        for slowdown in dict.fromkeys(config.slowdowns)
    ]


class Trainer:
    """Trains a method; only the clock depends on the slow link."""

    def __init__(self, config: Any, setting: Mapping[str, Any]):
        """Traces the step once, to count its bytes.

        Args:
          config: The config of the study.
          setting: Has the method.
        """
        self._config, self._task = config, Task("digits")
        self._build, _ = METHODS[setting["method"]]
        self._advance = jax.jit(self._chunk)
        self._runs: dict[tuple[int, float, bool], list[dict[str, Any]]] = {}
        data, params = self._task.dataset, self._task.first_weights(0)
        example = data.train_inputs[: config.batch], data.train_labels[: config.batch]
        self._account = jaxcomm.wire.account(
            self._step(0.1), params, self._init(params, 0), example
        )

    def _tx(self, rate: Any, seed: Any) -> optax.GradientTransformation:
        return optax.chain(self._build(seed), optax.sgd(rate, momentum=0.9))

    def _init(self, params: Any, seed: int) -> Any:
        return jaxcomm.init(self._tx(0.1, seed), params, self._config.workers)

    def _step(self, rate: Any) -> Any:
        return jaxcomm.simulate(self._task.loss, self._tx(rate, 0), self._config.workers)

    def _chunk(self, rate: jax.Array, carried: Any, batches: Any) -> Any:
        step = self._step(rate)

        def body(carry: Any, batch: Any) -> Any:
            *carry, _ = step(*carry, batch)
            return tuple(carry), None

        return jax.lax.scan(body, carried, batches)[0]

    def _run(self, seed: int, rate: float, validation: bool) -> list[dict[str, Any]]:
        task = self._task.hold_out(self._config.batch) if validation else self._task
        params = task.first_weights(seed)
        carried = params, self._init(params, seed)
        batches, every = task.batches(seed, self._config.batch), self._config.log_every
        steps = self._config.steps // 2 if validation else self._config.steps
        points: list[dict[str, Any]] = []
        for done in range(every, steps + 1, every):
            inputs, labels = zip(*itertools.islice(batches, every), strict=True)
            given = np.stack(inputs), np.stack(labels)
            carried = self._advance(jnp.float32(rate), carried, given)
            if not validation:
                points.append({"step": done, "train_loss": task.train_score(carried[0])[0]})
        loss, accuracy = task.test_score(carried[0])
        if validation:
            return [{"validation_loss": loss}]
        late = [each["train_loss"] for each in points if each["step"] > steps / 2]
        end = {"late_loss": statistics.mean(late), "test_loss": loss, "test_accuracy": accuracy}
        return [*points, {**end, "train_loss": points[-1]["train_loss"]}]

    def __call__(
        self, setting: Mapping[str, Any], seed: int, parameters: Mapping[str, Any], *,
        validation: bool,
    ) -> Iterator[dict[str, Any]]:  # fmt: skip
        """Trains once, or repeats the same run on another clock; yields points and the results."""
        config, given = self._config, (seed, parameters["learning_rate"], validation)
        if given not in self._runs:
            self._runs[given] = self._run(*given)
        *points, end = self._runs[given]
        if validation:
            yield end
            return
        seconds = config.step_seconds + seconds_of(
            self._account, config.workers, setting["slowdown"], config.bandwidth
        )
        for point in points:
            yield {**point, "seconds": point["step"] * seconds}
        yield {
            **end,
            "step_milliseconds": 1e3 * seconds,
            "slow_sent": self._account.bytes_sent(0),
            "slow_received": self._account.bytes_received(0),
            "others_sent": self._account.bytes_sent(1),
            "others_received": self._account.bytes_received(1),
        }
