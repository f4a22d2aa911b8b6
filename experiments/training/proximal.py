"""Trains digits with l1 proximal steps on owners of slices, whose updates are pulled sparsely."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomm
from experiments.cli.errors import ExperimentError
from experiments.tasks.task import Task
from experiments.training.trainer import load_task
from jaxcomm.aggregation._rows import to_slices
from jaxcomm.compression.sparsifiers import nonzero

ROOMS = 40  # The room of the sparse pull is a multiple of 1 / ROOMS, so that few are compiled.
MARGIN = 1.2
DENSE = 0.0  # The strength of the reference.


class Program(NamedTuple):
    """A compiled step, its transformation, and the bytes of a worker's pull and of all messages."""

    step: Callable[..., Any]
    tx: Any
    pulled: float
    sent: float


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def make_program(config: Any, task: Task, strength: float, density: float | None) -> Program:
    """The step of a strength; `density` is the room of the pull, which is dense without one."""
    regularizer = jaxcomm.regularizers.l1(strength, mask=_is_matrix)
    rate = config.learning_rate
    inner = jaxcomm.proximal(optax.sgd(rate), regularizer, rate)
    pull = None if density is None else nonzero(density=density, granularity="element")
    tx = jaxcomm.sharded_server(inner, pull=pull, scope="bucket")
    step = jaxcomm.simulate(task.loss, tx, config.workers, metrics="own", donate=False)
    shapes = jax.eval_shape(lambda: task.first_weights(0))
    state = jax.eval_shape(lambda params: jaxcomm.init(tx, params, config.workers), shapes)
    rows = next(task.batches(0, config.batch))
    account = jaxcomm.wire.account(step, shapes, state, jax.tree.map(_shape, rows))
    pulls = [each for each in account.collectives if each.primitive == "all_gather"]
    pulled = sum(each.bytes_per_worker for each in pulls)
    return Program(step, tx, pulled, account.bytes_per_worker)


def _shape(x: np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@functools.partial(jax.jit, static_argnums=2)
def _densities(before: Any, after: Any, workers: int) -> tuple[jax.Array, jax.Array]:
    """The part of the weights that is not zero, and the largest of a worker's updates."""
    leaves = jax.tree.leaves(after)
    weights = sum(jnp.sum(x != 0) for x in leaves) / sum(x.size for x in leaves)
    changed = jax.tree.map(lambda x, y: to_slices(x != y, workers), before, after)
    rows = jnp.concatenate([x.reshape(workers, -1) for x in jax.tree.leaves(changed)], axis=1)
    return weights, jnp.max(jnp.mean(rows.astype(jnp.float32), axis=1))


def settings(config: Any) -> list[dict[str, str]]:
    """The reference, and the strengths.

    Raises:
      ExperimentError: If an option is out of range.
    """
    if config.steps < 4:
        raise ExperimentError(f"--steps must be at least 4, got {config.steps}.")
    if config.batch % config.workers:
        raise ExperimentError(f"--workers {config.workers} does not divide --batch {config.batch}.")
    return [{"strength": f"{each:g}"} for each in (DENSE, *sorted({*config.strengths}))]


def train(config: Any, setting: Mapping[str, str]) -> Callable[..., Iterator[Mapping[str, Any]]]:
    """What trains a strength: with a dense pull, and in the last quarter with both pulls."""
    task, strength = load_task("digits"), float(setting["strength"])
    program = functools.cache(lambda density: make_program(config, task, strength, density))
    last = config.steps // 4
    first = config.steps - last

    def trainer(setting: Any, seed: int, *_: Any, **__: Any) -> Iterator[Mapping[str, Any]]:
        del setting
        dense, batches = program(None), task.batches(seed, config.batch)
        params = task.first_weights(seed)
        state, updated = jaxcomm.init(dense.tx, params, config.workers), 0.0
        for number in range(first):
            before = params
            params, state, _ = dense.step(params, state, next(batches))
            weights, largest = _densities(before, params, config.workers)
            if number >= first - last:
                updated = max(updated, float(largest))
            if number % max(1, first // 20) == 0:
                yield {"step": number, "density": float(weights), "updated": float(largest)}
        room = min(math.ceil(MARGIN * updated * ROOMS), ROOMS) / ROOMS
        sparse = program(room)
        pulled = params
        other = jaxcomm.init(sparse.tx, params, config.workers)
        for _ in range(last):
            batch = next(batches)
            params, state, _ = dense.step(params, state, batch)
            pulled, other, _ = sparse.step(pulled, other, batch)
        same = jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), params, pulled)
        loss, accuracy = task.test_score(pulled)
        weights, _ = _densities(params, params, config.workers)
        yield {
            "test_loss": loss,
            "test_error": 1 - accuracy,
            "weights": float(weights),
            "updates": updated,
            "room": room,
            "pulled": sparse.pulled,
            "sent": sparse.sent,
            "pull_ratio": sparse.pulled / dense.pulled,
            "pull_ratio_16": sparse.pulled / (dense.pulled / 2),
            "sent_ratio": sparse.sent / dense.sent,
            "same": all(jax.tree.leaves(same)),
        }

    return trainer
