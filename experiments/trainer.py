"""The training loop: the compiled step of a method, what a run logs, and its errors."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcomm
from experiments.errors import ExperimentError
from experiments.methods import DEFAULT_RATES, Method, parse_method
from experiments.tasks.task import Task
from jaxcomm._gradients import backward_of
from jaxcomm.training import describe_nonfinite
from jaxcomm.wire._account import Account

OPTIMIZERS: dict[str, Callable[[Any, float | None], optax.GradientTransformation]] = {
    "sgd": lambda learning_rate, momentum: optax.sgd(learning_rate, momentum=momentum),
    "adam": lambda learning_rate, momentum: optax.adam(learning_rate),
    # The default of optax, 0.1, is much larger than the squared gradients here.
    "adagrad": lambda learning_rate, momentum: optax.adagrad(learning_rate, 0.0),
}
"""`(learning_rate, momentum) -> optimizer`; the momentum is None if the aggregator has its own."""

OPTIMIZER_TITLES = {"sgd": "SGD with momentum", "adam": "Adam", "adagrad": "Adagrad"}
MOMENTUM = 0.9

UPDATE_ERROR = "update_error"


def relative_error(update: Any, gradient: Any) -> jax.Array:
    """The squared error of an update, relative to the squared norm of the mean gradient."""
    exact = jaxcomm.mean()
    mean, _ = exact.update(gradient, exact.init(gradient))
    error = optax.tree.norm(optax.tree.sub(update, mean), squared=True)
    return error / optax.tree.norm(mean, squared=True)


class WithErrorState(NamedTuple):
    """The state of `with_error`."""

    inner: Any
    diagnostics: dict[str, jax.Array]  # A step copies this field into its metrics.


def with_error(
    aggregator: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """The aggregator, which also reports the relative squared error of its update.

    It is NaN for methods without gradients.
    """

    def init(params: Any) -> WithErrorState:
        return WithErrorState(aggregator.init(params), {UPDATE_ERROR: jnp.zeros(())})

    def update(
        updates: Any, state: WithErrorState, params: Any = None, **extra: Any
    ) -> tuple[Any, WithErrorState]:
        update, inner = aggregator.update(updates, state.inner, params, **extra)
        # A method that evaluates the loss itself gets no gradient, so there is no mean to compare.
        has_gradient = backward_of(updates) is None
        error = relative_error(update, updates) if has_gradient else jnp.full((), jnp.nan)
        return update, WithErrorState(inner, {UPDATE_ERROR: error})

    return optax.GradientTransformationExtraArgs(init, update)


@functools.cache
def make_compression_error(task: Task, method: Method, mesh: Mesh) -> Callable[..., jax.Array]:
    """`(params, aggregator_state, batch) -> float32[]`, the relative error of an update.

    It changes neither, and is compiled once for all optimizers.
    """
    aggregator = method.build(seed=0)

    def on_worker(params: Any, state: Any, batch: Any) -> jax.Array:
        _, gradient = jaxcomm.local_value_and_grad(task.loss)(params, batch)
        update, _ = aggregator.update(gradient, state, params)
        return relative_error(update, gradient)

    @jax.jit
    def compression_error(params: Any, state: Any, batch: Any) -> jax.Array:
        specs = jaxcomm.state_specs(params), jaxcomm.state_specs(state), PartitionSpec("data")
        return jax.shard_map(on_worker, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(
            params, state, batch
        )

    return compression_error


def count_bytes(method: Any, gradients: Any, mesh: Mesh) -> float:
    """The bytes that a worker sends for one update, from the traced program.

    Args:
      method: The method.
      gradients: The gradients of all workers, or their shapes, with leaves `[workers, ...]`.
      mesh: The workers.

    Raises:
      ExperimentError: If the method does not support the number of workers.
    """

    def on_worker(gradients: Any) -> Any:
        gradient, aggregator = jax.tree.map(lambda x: x[0], gradients), method.build(seed=0)
        return aggregator.update(gradient, aggregator.init(gradient))[0]

    update = jax.shard_map(
        on_worker, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec()
    )
    try:
        return jaxcomm.wire.account(update, gradients).bytes_per_worker
    except ValueError as error:
        raise ExperimentError(str(error)) from error


def own_rows(sharding: NamedSharding, size: int) -> np.ndarray:
    """The row numbers, ascending, on the devices of this process if `size` rows are sharded."""
    slices = sharding.addressable_devices_indices_map((size,)).values()
    ranges = sorted({index[0].indices(size)[:2] for index in slices})
    return np.concatenate([np.arange(*each) for each in ranges])


def global_batches(task: Task, seed: int, size: int, mesh: Mesh) -> Iterator[Any]:
    """The batches of `task.batches(seed, size)` as arrays over the axis `"data"` of the mesh.

    Each process loads its rows only.
    """
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    for batch in task.batches(seed, size, own_rows(sharding, size)):
        yield jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(sharding, x, (size, *x.shape[1:])),
            batch,
        )


def make_mesh(devices: int | None) -> Mesh:
    """A mesh of `devices` workers, by default of all devices."""
    if devices is not None and devices > jax.device_count():
        raise ExperimentError(
            f"--devices {devices} exceeds the {jax.device_count()} devices of "
            f"{jax.default_backend()}; set JAX_PLATFORMS=cpu to use any number of fake devices."
        )
    axis = devices or jax.device_count()
    return jax.make_mesh((axis,), ("data",), axis_types=(AxisType.Auto,))


class Program(NamedTuple):
    """The compiled step of one method and optimizer, shared by all seeds and learning rates."""

    task: Task
    method: Method
    learning_rate: float
    step: Callable[..., Any]
    first: Callable[[int, float], tuple[Any, optax.OptState]]
    batches: Callable[[Task, int], Iterator[Any]]
    compression_error: Callable[..., jax.Array | float] | None  # `None` if the step reports it.
    account: Account

    def bytes_of_step(self, opt_state: optax.OptState) -> float:
        """The bytes that a worker sends in the step from a state."""
        if self.method.stage is None:
            return self.account.bytes_per_worker
        state = opt_state[0] if self.compression_error else opt_state[0].inner
        branch = f"cond {self.method.stage(state) + 1}/"
        return sum(
            collective.bytes_per_worker
            for collective in self.account.collectives
            if not collective.path or collective.path[0].startswith(branch)
        )


def make_program(
    task: Task,
    method: Method,
    optimizer: str,
    learning_rate: float,
    batch: int,
    mesh: Mesh,
    *,
    simulated: bool = False,
    with_errors: bool = True,
) -> Program:
    """Builds the step, which is compiled at its first call.

    Args:
      task: The task.
      method: The method.
      optimizer: The name of the optimizer.
      learning_rate: The learning rate; `_replace` changes it without a new compilation.
      batch: Examples per step.
      mesh: The workers.
      simulated: Whether one device simulates all workers, which is faster.
      with_errors: Whether the errors of updates are measured, at a cost.

    Raises:
      ExperimentError: If the method does not support the number of workers, or the batch cannot be
        split among them.
    """
    if batch % mesh.size:
        raise ExperimentError(f"--batch {batch} is not divisible by {mesh.size} workers")
    momentum = None if method.has_momentum else MOMENTUM
    reports_error = simulated and with_errors

    def transformation(seed: Any, learning_rate: Any, error: bool) -> optax.GradientTransformation:
        aggregator = method.build(seed=seed)
        rated = optax.inject_hyperparams(lambda rate: OPTIMIZERS[optimizer](rate, momentum))
        return optax.chain(with_error(aggregator) if error else aggregator, rated(learning_rate))

    def make_step(error: bool) -> Callable[..., Any]:
        tx = transformation(0, learning_rate, error)
        if simulated:
            return jaxcomm.simulate(task.loss, tx, mesh.size)
        return jaxcomm.make_step(task.loss, tx, mesh)

    @functools.partial(jax.jit, static_argnames="error")
    def first_state(seed: Any, learning_rate: Any, params: Any, error: bool) -> optax.OptState:
        tx = transformation(seed, learning_rate, error)
        return jaxcomm.init(tx, params, mesh.size if simulated else mesh)

    def first(seed: int, learning_rate: float) -> tuple[Any, optax.OptState]:
        params = task.first_weights(seed)
        if not simulated:
            params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
        return params, first_state(seed, learning_rate, params, reports_error)

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
    measure: Callable[..., Any] | None = lambda *_: math.nan  # noqa: E731
    if with_errors:
        measure = None if reports_error else make_compression_error(task, method, mesh)
    step = make_step(reports_error)
    return Program(task, method, learning_rate, step, first, batches, measure, account)


def train(
    program: Program, seed: int, steps: int, log_every: int, finite_on: Mesh | None = None
) -> Iterator[dict[str, Any]]:
    """Trains once; yields metrics every `log_every` steps, and at last those of the run.

    Args:
      program: The step.
      seed: The seed of weights and batches.
      steps: The number of steps.
      log_every: The steps between two logged points.
      finite_on: The workers, to end the run at a step that is not finite and say whose data is why;
        otherwise, losses show it.

    Raises:
      ExperimentError: If a step is not finite, with `finite_on`.
    """
    task = program.task
    params, opt_state = program.first(seed, program.learning_rate)
    batches = program.batches(task, seed)
    milliseconds, errors, bytes_sent = [], [], 0.0
    for number in range(1, steps + 1):
        batch = next(batches)
        bytes_sent += program.bytes_of_step(opt_state)
        logged = number % log_every == 0 or number == steps
        if logged and program.compression_error:
            errors.append(float(program.compression_error(params, opt_state[0], batch)))
        before = jax.tree.map(jnp.copy, params) if finite_on else None  # A step donates them.
        start = time.perf_counter()
        params, opt_state, metrics = program.step(params, opt_state, batch)
        batch_loss = float(metrics["loss"])
        milliseconds.append(1e3 * (time.perf_counter() - start))
        if finite_on:
            _require_finite(task, number, batch_loss, before, params, batch, finite_on)
        if logged:
            if not program.compression_error:
                errors.append(float(metrics[f"diagnostics/{UPDATE_ERROR}"]))
            if program.method.is_vote:
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
    }


def _require_finite(
    task: Task, number: int, loss: float, before: Any, after: Any, batch: Any, mesh: Mesh
) -> None:
    """Checks the loss of a step, and the parameters after it. All processes call it."""
    finite = jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(after)])
    if math.isfinite(loss) and bool(jnp.all(finite)):
        return
    what = "update" if math.isfinite(loss) else "loss"
    found = describe_nonfinite(task.loss, before, batch, mesh)
    why = found or "all gradients are finite, so the method or the optimizer made it so"
    raise ExperimentError(
        f"the {what} of step {number} is not finite: {why}. Correct the data of the worker, or use "
        "a smaller --learning-rate."
    )


@functools.cache
def load_task(name: str, scored_examples: int | None = None) -> Task:
    """A task by its name, DATASET or DATASET:PATH, whose data are read once."""
    dataset, _, path = name.partition(":")
    return Task(dataset, path or None, scored_examples=scored_examples)


def over_programs(
    program_of: Callable[..., Program], held_out: Task, steps: int, log_every: int, trial_steps: int
) -> Callable[..., Iterator[dict[str, Any]]]:
    """What trains with programs; see `experiments.study.run.Trainer`.

    Learning rates and seeds share a program.

    Args:
      program_of: `**options of the method -> program`, called once per combination.
      held_out: The task of trials, whose test set is a validation set.
      steps: The steps of a run.
      log_every: The steps between two logged points of a run.
      trial_steps: The steps of a trial.
    """
    cached = functools.cache(program_of)

    def run(
        setting: Any, seed: int, parameters: Mapping[str, Any], *, validation: bool
    ) -> Iterator[dict[str, Any]]:
        options = {name: value for name, value in parameters.items() if name != "learning_rate"}
        program = cached(**options)
        if "learning_rate" in parameters:
            program = program._replace(learning_rate=parameters["learning_rate"])
        if not validation:
            yield from train(program, seed, steps, log_every)
            return
        *_, end = train(program._replace(task=held_out), seed, trial_steps, trial_steps)
        yield {f"validation_{name}": end[f"test_{name}"] for name in ("loss", "accuracy")}

    return run


def make_trainer(
    config: Any,
    label: str,
    optimizer: str,
    task: Task,
    *,
    steps: int,
    log_every: int,
    trial_steps: int | None = None,
    simulated: bool = False,
) -> Callable[..., Iterator[dict[str, Any]]]:
    """What trains a method; see `over_programs`. Nothing is compiled before the first run.

    Args:
      config: The config of the study, with `batch` and `devices`.
      label: The label of the method.
      optimizer: The name of the optimizer, with its default rate in runs without a tuned one.
      task: The task.
      steps: The steps of a run.
      log_every: The steps between two logged points of a run.
      trial_steps: The steps of a trial, which trains without the validation set.
      simulated: Whether one device simulates all workers.

    Raises:
      ExperimentError: If there is no such method, or an option is invalid.
    """
    method, mesh = parse_method(label), make_mesh(config.devices)
    held_out = task.hold_out(config.batch) if trial_steps else task

    def program_of(**options: Any) -> Program:
        arguments = optimizer, DEFAULT_RATES[optimizer], config.batch, mesh
        return make_program(task, method.tuned(**options), *arguments, simulated=simulated)

    program_of()  # Finds wrong options.
    return over_programs(program_of, held_out, steps, log_every, trial_steps or steps)
