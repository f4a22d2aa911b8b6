"""Outer steps among simulated workers on text: the compiled steps of a method, for all runs."""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomm
from experiments.cli.choices import select
from experiments.cli.errors import ExperimentError
from experiments.methods.outer import BASELINE, INNERS, METHODS
from experiments.tasks.partitions import orders, split
from experiments.tasks.task import Task

WINDOW, SCORED = 32, 1000


@functools.cache
def text() -> Task:
    """The task of all settings."""
    return Task("text", scored_examples=SCORED, window=WINDOW)


def settings(config: Any) -> Sequence[Mapping[str, Any]]:
    """The settings of the config of the study, baselines first.

    Raises:
      ExperimentError: If a method does not exist, or a number does not divide another.
    """
    methods = select(config.methods, [*METHODS], "--methods")
    for workers in config.workers:
        if config.batch % workers:
            raise ExperimentError(
                f"--batch {config.batch} is not divisible by {workers} of --workers."
            )
    for period in config.periods:
        if config.steps % period:
            raise ExperimentError(
                f"--steps {config.steps} is not divisible by {period} of --periods."
            )
    if config.steps % config.log_every:
        raise ExperimentError(
            f"--steps {config.steps} is not divisible by --log-every {config.log_every}."
        )
    return [
        {"workers": workers, "inner": inner, "period": period, "method": name}
        for workers in config.workers
        for inner in INNERS
        for name, method in METHODS.items()
        if name in (*methods, BASELINE) and inner in method.inners
        for period in (config.periods if method.is_local else (1,))
    ]


class Program:
    """The compiled steps of a method with an inner optimizer, for any rates and seed."""

    def __init__(self, name: str, inner: str, workers: int, period: int | None, batch: int):
        """Traces the step once, to count its bytes.

        Args:
          name: The method.
          inner: The inner optimizer.
          workers: The number of workers.
          period: The period if the program depends on it; otherwise it is an argument.
          batch: Examples per step.
        """
        self._method, self._inner, self._workers = METHODS[name], INNERS[inner], workers
        self._period, self._batch = period, batch
        self.init = jax.jit(lambda params: jaxcomm.init(self._tx(0.1, 1, 1.0), params, workers))
        self.advance = jax.jit(self._chunk, donate_argnums=(3,))

    def _tx(self, rate: Any, period: Any, scale: Any) -> Any:
        own = self._period or (lambda step: period)
        return self._method.build(self._inner(rate), own, self._workers, scale)

    def _step(self, rate: Any, period: Any, scale: Any) -> Any:
        return jaxcomm.simulate(
            text().loss, self._tx(rate, period, scale), self._workers, metrics="own"
        )

    def start(self, params: Any) -> Any:
        """The parameters of all workers, and the state."""
        params = jaxcomm.replicate(params, self._workers) if self._method.is_local else params
        return params, self.init(params)

    def model(self, params: Any) -> Any:
        """The mean of the parameters of all workers."""
        return jaxcomm.consensus(params) if self._method.is_local else params

    def bytes_per_step(self, period: int) -> float:
        """The mean over steps of the bytes that a worker sends."""
        data = text().dataset
        example = data.train_inputs[: self._batch], data.train_labels[: self._batch]
        account = jaxcomm.wire.account(
            self._step(0.1, period, 1.0), *self.start(text().first_weights(0)), example
        )
        return self._method.mean_bytes(account, period)

    def _chunk(
        self, rate: jax.Array, period: jax.Array, scale: jax.Array, carried: Any, batches: Any
    ) -> Any:
        """Takes one step per batch."""
        step = self._step(rate, period, scale)
        body = lambda carry, batch: (step(*carry, batch)[:2], None)  # noqa: E731
        return jax.lax.scan(body, carried, batches)[0]


@functools.lru_cache(maxsize=1)
def program(name: str, inner: str, workers: int, period: int | None, batch: int) -> Program:
    """One program for successive settings that share it."""
    return Program(name, inner, workers, period, batch)


class Trainer:
    """Trains a setting, with any rates and seed."""

    def __init__(self, config: Any, setting: Mapping[str, Any]):
        """Counts the bytes of the setting.

        Args:
          config: The config of the study.
          setting: The setting.
        """
        self._config, method = config, METHODS[setting["method"]]
        static = setting["period"] if method.is_static else None
        given = setting["method"], setting["inner"], setting["workers"], static, config.batch
        self._program = program(*given)
        self._bytes = self._program.bytes_per_step(setting["period"])

    def __call__(
        self, setting: Mapping[str, Any], seed: int, parameters: Mapping[str, Any], *,
        validation: bool,
    ) -> Iterator[dict[str, Any]]:  # fmt: skip
        """Trains once; yields the logged points, and at last the results.

        Losses are of the mean of the parameters of all workers.
        """
        task = text().hold_out() if validation else text()
        data, workers, every = task.dataset, setting["workers"], self._config.log_every
        parts = split(data.train_labels, workers, "iid", seed)
        batches = orders(parts, self._config.batch // workers, seed)
        carried = self._program.start(task.first_weights(seed))
        steps = self._config.steps // 2 if validation else self._config.steps
        rate = jnp.float32(parameters["learning_rate"])
        for done in range(every, steps + 1, every):
            examples = np.stack([*itertools.islice(batches, every)])
            carried = self._program.advance(
                rate,
                jnp.int32(setting["period"]),
                jnp.float32(parameters.get("outer_scale", 1)),
                carried,
                (data.train_inputs[examples], data.train_labels[examples]),
            )
            if not validation:
                loss, _ = task.train_score(self._program.model(carried[0]))
                yield {"step": done, "train_loss": loss, "bytes_sent": done * self._bytes}
        test_loss, test_accuracy = task.test_score(self._program.model(carried[0]))
        if validation:
            yield {"validation_loss": test_loss}
            return
        yield {
            "train_loss": loss,
            "test_loss": test_loss,
            "test_accuracy": test_accuracy,
            "bytes_per_step": self._bytes,
        }
