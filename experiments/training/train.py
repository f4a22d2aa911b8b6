"""The training loop."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcomm
from experiments.cli.errors import ExperimentError
from experiments.methods import TrainableMethod
from experiments.tasks.task import Task
from experiments.training.compression_error import UPDATE_ERROR, make_compression_error, with_error
from experiments.training.diagnostics import read_diagnostics, update_maxima
from experiments.training.finite import FiniteSteps
from experiments.training.optimizers import MOMENTUM, OPTIMIZERS
from experiments.training.sharding import global_batches
from jaxcomm.wire._account import Account


class Program(NamedTuple):
    """The compiled step of one method and optimizer, shared by all seeds and learning rates."""

    task: Task
    variant: TrainableMethod
    optimizer: str
    learning_rate: float
    batch: int
    step: Callable[..., Any]
    first: Callable[[int, float], tuple[Any, optax.OptState]]
    batches: Callable[[Task, int], Iterator[Any]]
    compression_error: Callable[..., jax.Array | float] | None  # `None` if the step reports it.
    account: Account

    def start(self, seed: int) -> tuple[Any, optax.OptState]:
        """The initial parameters and state."""
        return self.first(seed, self.learning_rate)

    def bytes_of_step(self, opt_state: optax.OptState) -> float:
        """The bytes that a worker sends in the step from a state."""
        stage = self.variant.stage
        if stage is None:
            return self.account.bytes_per_worker
        state = opt_state[0] if self.compression_error else opt_state[0].inner
        branch = f"cond {stage(state) + 1}/"
        return sum(
            collective.bytes_per_worker
            for collective in self.account.collectives
            if not collective.path or collective.path[0].startswith(branch)
        )


def make_mesh(devices: int | None) -> Mesh:
    """A mesh of `devices` workers, by default of all devices.

    Raises:
      ExperimentError: If there are fewer devices.
    """
    available = jax.device_count()
    if devices is not None and devices > available:
        raise ExperimentError(
            f"--devices {devices} exceeds the {available} devices of {jax.default_backend()}; set "
            "JAX_PLATFORMS=cpu to use any number of fake devices."
        )
    return jax.make_mesh((devices or available,), ("data",), axis_types=(AxisType.Auto,))


@functools.cache
def _compression_error(
    task: Task, variant: TrainableMethod, mesh: Mesh
) -> Callable[..., jax.Array]:
    """Compiled once for all optimizers."""
    return make_compression_error(task.loss, variant.build(0), mesh)


def _unmeasured(*arguments: Any) -> float:
    del arguments
    return math.nan


def make_program(
    task: Task,
    variant: TrainableMethod,
    optimizer: str,
    learning_rate: float,
    batch: int,
    mesh: Mesh,
    *,
    simulated: bool = False,
    with_diagnostics: bool = True,
) -> Program:
    """Builds the step, which is compiled at its first call.

    Args:
      task: The task.
      variant: The method.
      optimizer: The name of the optimizer.
      learning_rate: The learning rate; `_replace` changes it without a new compilation.
      batch: Examples per step.
      mesh: The workers.
      simulated: Whether one device simulates all workers, which is faster.
      with_diagnostics: Whether the error and diagnostics of aggregators are measured, at a cost.

    Raises:
      ExperimentError: If the method does not support the number of workers, or the batch cannot be
        split among them.
    """
    if batch % mesh.size:
        raise ExperimentError(f"--batch {batch} is not divisible by {mesh.size} workers")
    momentum = None if variant.has_momentum else MOMENTUM
    reports_error = simulated and with_diagnostics

    def transformation(
        seed: int | jax.Array, learning_rate: float | jax.Array, with_diagnostics: bool
    ) -> optax.GradientTransformation:
        aggregator = (
            with_error(variant.build_with_diagnostics(seed))
            if with_diagnostics
            else variant.build(seed)
        )
        rated = optax.inject_hyperparams(
            lambda learning_rate: OPTIMIZERS[optimizer](learning_rate, momentum)
        )
        return optax.chain(aggregator, rated(learning_rate=learning_rate))

    def make_step(with_diagnostics: bool) -> Callable[..., Any]:
        tx = transformation(0, learning_rate, with_diagnostics)
        if simulated:
            return jaxcomm.simulate(task.loss, tx, mesh.size)
        return jaxcomm.make_step(task.loss, tx, mesh)

    def first_state(
        seed: int | jax.Array, learning_rate: float | jax.Array, params: Any, with_diagnostics: bool
    ) -> optax.OptState:
        tx = transformation(seed, learning_rate, with_diagnostics)
        return jaxcomm.init(tx, params, mesh.size if simulated else mesh)

    make_state = jax.jit(first_state, static_argnames="with_diagnostics")

    def first(seed: int, learning_rate: float) -> tuple[Any, optax.OptState]:
        params = task.first_weights(seed)
        if not simulated:
            params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
        return params, make_state(seed, learning_rate, params, reports_error)

    def batches(task: Task, seed: int) -> Iterator[Any]:
        return task.batches(seed, batch) if simulated else global_batches(task, seed, batch, mesh)

    try:
        params = jax.eval_shape(task.first_weights, 0)
        state = jax.eval_shape(lambda params: first_state(0, learning_rate, params, False), params)
        account = jaxcomm.wire.account(
            make_step(False), params, state, next(task.batches(0, batch))
        )
    except ValueError as error:
        raise ExperimentError(str(error)) from error
    measure = (
        _compression_error(task, variant, mesh)
        if with_diagnostics and not reports_error
        else _unmeasured
    )
    return Program(
        task,
        variant,
        optimizer,
        learning_rate,
        batch,
        make_step(reports_error),
        first,
        batches,
        None if reports_error else measure,
        account,
    )


def train(
    program: Program, seed: int, steps: int, log_every: int, finite: FiniteSteps | None = None
) -> Iterator[dict[str, Any]]:
    """Trains once; yields metrics every `log_every` steps, and at last those of the run.

    Args:
      program: The step.
      seed: The seed of weights and batches.
      steps: The number of steps.
      log_every: The steps between two logged points.
      finite: If given, ends the run at a step that is not finite; otherwise, losses show it.

    Raises:
      ExperimentError: If a step is not finite, with `finite`.
    """
    task = program.task
    params, opt_state = program.start(seed)
    batches = program.batches(task, seed)
    milliseconds, errors, maxima, bytes_sent = [], [], {}, 0.0
    for number in range(1, steps + 1):
        batch = next(batches)
        bytes_sent += program.bytes_of_step(opt_state)
        logged = number % log_every == 0 or number == steps
        if logged and program.compression_error:
            errors.append(float(program.compression_error(params, opt_state[0], batch)))
        before = finite.before(params) if finite else None
        start = time.perf_counter()
        params, opt_state, metrics = program.step(params, opt_state, batch)
        batch_loss = float(metrics["loss"])
        milliseconds.append(1e3 * (time.perf_counter() - start))
        if finite:
            finite.require(number, batch_loss, before, params, batch)
        maxima |= update_maxima(maxima, diagnostics := read_diagnostics(metrics))
        if logged:
            if not program.compression_error:
                errors.append(diagnostics[UPDATE_ERROR])
            if program.variant.is_vote:
                errors[-1] = math.nan
            train_loss, train_accuracy = task.train_score(params)
            yield {
                "step": number,
                "train_loss": train_loss,
                "batch_loss": batch_loss,
                "bytes_sent": bytes_sent,
                "compression_error": errors[-1],
            }
    test_loss, test_accuracy = task.test_score(params)
    yield {
        "steps": steps,
        "train_loss": train_loss,
        "train_accuracy": train_accuracy,
        "test_loss": test_loss,
        "test_accuracy": test_accuracy,
        "bytes_per_step": bytes_sent / steps,
        "compression_error": statistics.mean(errors),
        "step_milliseconds": statistics.median(milliseconds),
        **maxima,
    }
