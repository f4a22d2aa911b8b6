"""Distributed mean estimation: the error of a method on the gradients of a training run."""

import functools
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

import jaxcomm
from experiments.cli.errors import ExperimentError
from experiments.methods import BASELINE, ESTIMATORS, expand, parse_variant
from experiments.tasks.task import Task
from experiments.training.traffic import count_bytes
from experiments.training.train import make_mesh, make_program

_task = functools.cache(Task)


@functools.lru_cache(maxsize=1)
def collect_gradients(config: Any) -> dict[int, np.ndarray]:
    """The gradients of the workers, float32[workers, d], at each step in `config.steps`.

    The gradient at step 1 is that of the initial weights.
    """
    task, mesh = _task(config.dataset), make_mesh(config.devices)

    @jax.jit
    def local_gradients(params: Any, batch: Any) -> jax.Array:
        def on_worker(params: Any, batch: Any) -> jax.Array:
            _, gradient = jaxcomm.local_value_and_grad(task.loss)(params, batch)
            return ravel_pytree(gradient)[0][None]

        specs = jaxcomm.state_specs(params), PartitionSpec("data")
        return jax.shard_map(on_worker, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("data"))(
            params, batch
        )

    exact = parse_variant(BASELINE)
    program = make_program(task, exact, "sgd", config.learning_rate, config.batch, mesh)
    params, opt_state = program.start(config.seed)
    batches, gradients = task.batches(config.seed, config.batch), {}
    for number in range(1, max(config.steps) + 1):
        batch = next(batches)
        if number in config.steps:
            gradients[number] = np.asarray(local_gradients(params, batch))
        params, opt_state, _ = program.step(params, opt_state, batch)
    return gradients


def make_estimator(method: str, mesh: Mesh) -> Callable[..., jax.Array]:
    """`(seed, float32[workers, d]) -> float32[d]`: the estimate of the mean by the method."""
    variant = parse_variant(method)

    @jax.jit
    def estimate(seed: jax.Array, gradients: jax.Array) -> jax.Array:
        def on_worker(seed: jax.Array, gradient: jax.Array) -> jax.Array:
            aggregator = variant.build(seed)
            return aggregator.update(gradient[0], aggregator.init(gradient[0]))[0]

        specs = PartitionSpec(), PartitionSpec("data")
        return jax.shard_map(on_worker, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(
            seed, gradients
        )

    return estimate


@functools.cache
def bytes_of(method: str, mesh: Mesh, size: int) -> float:
    """The bytes that a worker sends for one estimate of `size` coordinates.

    Raises:
      ExperimentError: If the method does not support the number of workers.
    """
    gradients = jax.ShapeDtypeStruct((mesh.size, size), np.float32)
    return count_bytes(parse_variant(method), gradients, mesh)


def measure(
    estimate: Callable[..., jax.Array], gradients: np.ndarray, draws: int, first_seed: int
) -> dict[str, float]:
    """Errors relative to the squared norm of the mean, over draws with consecutive seeds.

    `squared_bias` is an unbiased estimate, so it may be below 0.
    """
    mean = gradients.astype(np.float64).mean(axis=0)
    seeds = [np.uint32(first_seed + draw) for draw in range(draws)]
    updates = np.stack([np.asarray(estimate(seed, gradients), np.float64) for seed in seeds])
    scale = np.vdot(mean, mean)
    errors = np.square(updates - mean).sum(axis=1) / scale
    average = updates.mean(axis=0)
    variance = np.square(updates - average).sum() / scale / max(1, draws - 1)
    return {
        "error": float(errors.mean()),
        "error_sd": float(errors.std(ddof=1)) if draws > 1 else float("nan"),
        "squared_bias": float(np.square(average - mean).sum() / scale - variance / draws),
    }


def predict(method: str, gradients: np.ndarray) -> dict[str, float]:
    r"""The expected error of `global_qsgd:BITS`; nothing for other methods.

    .. math:: \frac{\sum_{ij} a_{ij} (1 - a_{ij}) (\|x\|_\infty / s)^2}{n^2 \|\bar x\|^2}

    with s levels, the largest number for which the sum over workers fits into the bits, and the
    distance a of a coordinate from the level below, in units of the distance of two levels.
    """
    name, _, bits = method.partition(":")
    if name != "global_qsgd" or not bits:
        return {}
    x, workers = gradients.astype(np.float64), len(gradients)
    step = np.abs(x).max() / ((2 ** int(bits) - 1) // (2 * workers))
    above = x / step - np.floor(x / step)
    variance = np.square(step / workers) * (above * (1 - above)).sum()
    return {"predicted_error": float(variance / np.square(x.mean(axis=0)).sum())}


def settings(config: Any) -> list[dict[str, str]]:
    """The methods that the options select.

    Raises:
      ExperimentError: If a method does not exist, or does not support the number of workers.
    """
    mesh, task = make_mesh(config.devices), _task(config.dataset)
    if mesh.size < 2:
        raise ExperimentError("an estimate requires at least 2 workers, got --devices 1.")
    # The warning is about few levels, which are intended here.
    warnings.filterwarnings("ignore", "`bits`=", UserWarning)
    size = sum(leaf.size for leaf in jax.tree.leaves(task.first_weights(config.seed)))
    methods = expand(config.methods, ESTIMATORS)
    for method in methods:
        bytes_of(method, mesh, size)
    return [{"method": method} for method in methods]


def train(config: Any, setting: Mapping[str, str]) -> Callable[..., Iterator[Mapping[str, Any]]]:
    """The trainer of a method; its seeds are the steps."""
    method, gradients, mesh = (
        setting["method"],
        collect_gradients(config),
        make_mesh(config.devices),
    )
    estimate, variant = make_estimator(method, mesh), parse_variant(method)

    def trainer(setting: Any, seed: int, *_: Any, **__: Any) -> Iterator[Mapping[str, Any]]:
        workers, size = gradients[seed].shape
        sent, full = (bytes_of(each, mesh, size) for each in (method, BASELINE))
        first_seed = config.seed + sorted(gradients).index(seed) * config.draws
        yield {
            "step": seed,
            "draws": config.draws,
            "workers": workers,
            "coordinates": size,
            "is_unbiased": variant.kind == "unbiased",
            "is_control": variant.is_control,
            **measure(estimate, gradients[seed], config.draws, first_seed),
            **predict(method, gradients[seed]),
            "bytes_per_worker": sent,
            "bits_per_coordinate": 8 * sent / size,
            "bytes_ratio": sent / full,
        }

    return trainer


def files(results: Any) -> dict[str, bytes]:
    """The gradients of the last step."""
    gradients, content = collect_gradients(results.config), io.BytesIO()
    np.savez_compressed(content, gradients=gradients[max(gradients)], step=max(gradients))
    return {"gradients.npz": content.getvalue()}
