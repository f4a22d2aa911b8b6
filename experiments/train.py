"""The one training loop."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxcomm
from experiments import figures
from experiments.compression_error import make_compression_error
from experiments.configs import Train
from experiments.errors import ExperimentError
from experiments.methods import Variant, make_variant
from experiments.progress import Progress
from experiments.recording import describe_command, open_record
from experiments.summary import summarize, to_csv, to_markdown, to_table
from experiments.task import Task

MOMENTUM = 0.9

OPTIMIZERS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "sgd": lambda learning_rate: optax.sgd(learning_rate, momentum=MOMENTUM),
    "adam": optax.adam,
}


class Program(NamedTuple):
    """The compiled step of one method and optimizer, which all seeds share."""

    task: Task
    variant: Variant
    optimizer: str
    batch: int
    step: Callable[..., Any]
    start: Callable[[int], tuple[Any, optax.OptState]]
    compression_error: Callable[..., jax.Array]
    account: jaxcomm.wire.Account


def make_mesh(devices: int | None) -> Mesh:
    """A mesh of so many workers, or of all devices there are.

    Raises:
      ExperimentError: If there are fewer.
    """
    available = jax.device_count()
    if devices is not None and devices > available:
        raise ExperimentError(
            f"--devices {devices} exceeds the {available} devices of {jax.default_backend()}; set "
            "JAX_PLATFORMS=cpu for as many as wanted."
        )
    return jax.make_mesh((devices or available,), ("data",), axis_types=(AxisType.Auto,))


@functools.cache
def _compression_error(task: Task, variant: Variant, mesh: Mesh) -> Callable[..., jax.Array]:
    """Compiled once for all optimizers."""
    return make_compression_error(task.loss, variant.build(0), mesh)


def make_program(
    task: Task, variant: Variant, optimizer: str, learning_rate: float, batch: int, mesh: Mesh
) -> Program:
    """Builds the step, which compiles when it is first called.

    Raises:
      ExperimentError: If the method cannot work with so many workers, or the batch be split.
    """

    def transformation(seed: int | jax.Array) -> optax.GradientTransformation:
        return optax.chain(variant.build(seed), OPTIMIZERS[optimizer](learning_rate))

    @jax.jit
    def first_state(seed: jax.Array, params: Any) -> optax.OptState:
        return jaxcomm.init(transformation(seed), params, mesh)

    def start(seed: int) -> tuple[Any, optax.OptState]:
        replicated = NamedSharding(mesh, PartitionSpec())
        params = jax.device_put(task.first_weights(seed), replicated)
        return params, first_state(seed, params)

    step = jaxcomm.make_step(task.loss, transformation(0), mesh)
    try:
        account = jaxcomm.wire.account(step, *start(0), next(task.batches(0, batch)))
    except ValueError as error:
        raise ExperimentError(str(error)) from error
    compression_error = _compression_error(task, variant, mesh)
    return Program(task, variant, optimizer, batch, step, start, compression_error, account)


def train(program: Program, seed: int, steps: int, log_every: int) -> Iterator[dict[str, Any]]:
    """Trains once; yields a row of metrics every `log_every` steps, and one at the end."""
    task = program.task
    run = {"method": program.variant.label, "optimizer": program.optimizer, "seed": seed}
    sent = program.account.bytes_per_worker
    params, opt_state = program.start(seed)
    batches = task.batches(seed, program.batch)
    milliseconds, errors = [], []
    for number in range(1, steps + 1):
        batch = next(batches)
        logged = number % log_every == 0 or number == steps
        if logged:
            errors.append(float(program.compression_error(params, opt_state[0], batch)))
        start = time.perf_counter()
        params, opt_state, metrics = program.step(params, opt_state, batch)
        batch_loss = float(metrics["loss"])
        milliseconds.append(1e3 * (time.perf_counter() - start))
        if logged:
            train_loss, train_accuracy = task.train_score(params)
            yield {
                "kind": "step",
                **run,
                "step": number,
                "train_loss": train_loss,
                "batch_loss": batch_loss,
                "bytes_sent": number * sent,
                "compression_error": errors[-1],
            }
    test_loss, test_accuracy = task.test_score(params)
    yield {
        "kind": "run",
        **run,
        "steps": steps,
        "train_loss": train_loss,
        "train_accuracy": train_accuracy,
        "test_loss": test_loss,
        "test_accuracy": test_accuracy,
        "bytes_per_step": sent,
        "compression_error": statistics.mean(errors),
        "step_milliseconds": statistics.median(milliseconds),
    }


def main(config: Train) -> int:
    """Trains once, as `python -m experiments train` asks; the exit code."""
    mesh, variant = make_mesh(config.devices), make_variant(config.method, config.bits)
    task = Task(config.dataset, config.data)
    program = make_program(
        task, variant, config.optimizer, config.learning_rate, config.batch, mesh
    )
    with open_record(config) as record, Progress(config.steps) as progress:
        progress.say(
            f"{variant.label} on {config.dataset}, {config.optimizer}, {mesh.size} workers on "
            f"{jax.default_backend()}"
        )
        for row in train(program, config.seed, config.steps, config.log_every):
            record.add(row)
            if row["kind"] == "step":
                progress.advance(
                    row["step"],
                    f"step {row['step']}: training loss {row['train_loss']:.4f}, sent "
                    f"{row['bytes_sent']:,.0f} bytes a worker",
                )
        rows = summarize([row])
        progress.say("One step sends:")
        progress.say(program.account)
        progress.say(to_table(rows))
        record.write("table.csv", to_csv(rows))
        record.write(
            "README.md",
            f"# {variant.label} on {config.dataset}\n\nCommand: `{describe_command()}`\n\n"
            f"{to_markdown(rows)}\n![Training loss against bytes sent]({figures.NAME})\n",
        )
        if record.folder:
            figures.draw(record.folder)
            progress.say(f"Record: {record.folder}")
        record.finish()
    return 0
