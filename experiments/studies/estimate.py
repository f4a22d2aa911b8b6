"""How far from the exact mean is each method on real gradients, and at how many bits?"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

import jaxcomm
from experiments.errors import ExperimentError
from experiments.methods import ALL_LABELS, BASELINE, expand, parse_method
from experiments.study.claims import Claim, Results, is_better, is_within
from experiments.study.plot import Axis, Points
from experiments.study.run import CLAIMS, PROVENANCE, TABLE, TUNING, Options, Setting, Study
from experiments.study.table import (
    Column,
    Group,
    Line,
    Table,
    Value,
    extent,
    first,
    key,
    mean_of,
)
from experiments.trainer import count_bytes, load_task, make_mesh, make_program

LEARNING_RATE = 0.05  # of SGD with momentum 0.9
EXACT = 1e-12
"""Float32 sums in another order differ by less, relative to the squared norm of the mean."""


@dataclasses.dataclass(frozen=True)
class Estimate(Options):
    """How far from the exact mean is each method on real gradients, and at how many bits?

    Question: distributed mean estimation. A small convolutional network is trained once on
    scikit-learn's digits with the exact mean. At a few steps of that run, every method estimates
    the mean of the gradients of the 8 workers, with new rounding in each of 20 draws. What is the
    squared error E|G - mean|^2 / |mean|^2 of each method, and how many bytes does it send?

    Command: `python -m experiments estimate`.

    Expected time: one to two minutes on two CPU cores.

    Number: the error of each method and its bits per coordinate: 0.04 for `global_qsgd:8` at 14
    bits; the float32 all-reduce of 8 workers sends 56.
    """

    methods: tuple[str, ...] = ("all",)
    """methods to compare, each METHOD or METHOD:BITS, or all"""
    steps: tuple[int, ...] = (1, 20, 60, 150)
    """steps whose gradients are estimated"""
    draws: int = 20
    """estimates of the same gradients per method"""
    batch: int = 256
    """examples per step, over all workers"""
    devices: int | None = None
    """number of workers (default: the number in XLA_FLAGS, or 8)"""


@functools.lru_cache(maxsize=1)
def collect_gradients(config: Estimate) -> dict[int, np.ndarray]:
    """The gradients of the workers, float32[workers, d], at each step in `config.steps`.

    The gradient at step 1 is that of the initial weights.
    """
    task, mesh = load_task("digits"), make_mesh(config.devices)

    @jax.jit
    def local_gradients(params: Any, batch: Any) -> jax.Array:
        def on_worker(params: Any, batch: Any) -> jax.Array:
            _, gradient = jaxcomm.local_value_and_grad(task.loss)(params, batch)
            return ravel_pytree(gradient)[0][None]

        specs = jaxcomm.state_specs(params), PartitionSpec("data")
        return jax.shard_map(on_worker, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("data"))(
            params, batch
        )

    exact = parse_method(BASELINE)
    program = make_program(task, exact, "sgd", LEARNING_RATE, config.batch, mesh)
    params, opt_state = program.first(0, LEARNING_RATE)
    batches, gradients = task.batches(0, config.batch), {}
    for number in range(1, max(config.steps) + 1):
        batch = next(batches)
        if number in config.steps:
            gradients[number] = np.asarray(local_gradients(params, batch))
        params, opt_state, _ = program.step(params, opt_state, batch)
    return gradients


@functools.cache
def bytes_of(method: str, mesh: Mesh, size: int) -> float:
    """The bytes that a worker sends for one estimate of `size` coordinates."""
    gradients = jax.ShapeDtypeStruct((mesh.size, size), np.float32)
    return count_bytes(parse_method(method), gradients, mesh)


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


def settings(config: Estimate) -> list[dict[str, str]]:
    """The methods; of all, those that estimate the mean of a single step, without memory."""
    mesh, task = make_mesh(config.devices), load_task("digits")
    if mesh.size < 2:
        raise ExperimentError("an estimate requires at least 2 workers, got --devices 1.")
    # The warning is about few levels, which are intended here.
    warnings.filterwarnings("ignore", "`bits`=", UserWarning)
    size = sum(leaf.size for leaf in jax.tree.leaves(task.first_weights(0)))
    kinds = ("exact", "nearest", "unbiased", "biased")
    estimators = [label for label in ALL_LABELS if parse_method(label).kind in kinds]
    methods = expand(config.methods, estimators)
    for method in methods:
        bytes_of(method, mesh, size)  # A method that needs another number of workers is an error.
    return [{"method": method} for method in methods]


def train(config: Estimate, setting: Setting) -> Callable[..., Iterator[Mapping[str, Any]]]:
    """What estimates the mean by a method; the seeds of a run are the steps."""
    label, gradients, mesh = setting["method"], collect_gradients(config), make_mesh(config.devices)
    method = parse_method(label)

    @jax.jit
    def estimate(seed: jax.Array, gradients: jax.Array) -> jax.Array:
        def on_worker(seed: jax.Array, gradient: jax.Array) -> jax.Array:
            aggregator = method.build(seed=seed)
            return aggregator.update(gradient[0], aggregator.init(gradient[0]))[0]

        specs = PartitionSpec(), PartitionSpec("data")
        return jax.shard_map(on_worker, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(
            seed, gradients
        )

    def trainer(setting: Any, seed: int, *_: Any, **__: Any) -> Iterator[Mapping[str, Any]]:
        workers, size = gradients[seed].shape
        sent, full = (bytes_of(each, mesh, size) for each in (label, BASELINE))
        first_seed = sorted(gradients).index(seed) * config.draws
        yield {
            "step": seed,
            "draws": config.draws,
            "workers": workers,
            "coordinates": size,
            "is_unbiased": method.kind == "unbiased",
            "is_control": method.is_control,
            **measure(estimate, gradients[seed], config.draws, first_seed),
            **predict(label, gradients[seed]),
            "bytes_per_worker": sent,
            "bits_per_coordinate": 8 * sent / size,
            "bytes_ratio": sent / full,
        }

    return trainer


def unless_exact(value: Value) -> Value:
    return lambda group: value(group) if mean_of("error")(group) > EXACT else None


def ratio_of(total: str, count: str) -> Value:
    """The mean of a column over that of another; None if the runs have no such other."""

    def value(group: Group) -> float | None:
        if all(count not in run for run in group.runs):
            return None
        return mean_of(total)(group) / mean_of(count)(group)

    return value


bias, bits = unless_exact(ratio_of("squared_bias", "error")), first("bits_per_coordinate")
ERRORS = Table(
    by=("method",),
    columns=(
        key("method"),
        Column("error", extent("error"),
               lambda error: f"{error.mean:.2e}" if error.mean > EXACT else f"< {EXACT:.0e}"),
        Column("over steps", unless_exact(extent("error")),
               lambda error: f"{error.low:.1e} to {error.high:.1e}", in_csv=False),
        Column("share of bias", bias, "z.3f", "bias_share"),
        Column("of predicted", ratio_of("error", "predicted_error"), ".3f", "error_of_predicted"),
        Column("bytes/worker", first("bytes_per_worker"), ",.0f", "bytes_per_worker"),
        Column("bits/coordinate", bits, ".2f", "bits_per_coordinate"),
        Column("ratio", first("bytes_ratio"), ".3f", "bytes_ratio"),
        Column("error x bits", unless_exact(lambda group: mean_of("error")(group) * bits(group)),
               ".2e", "error_times_bits"),
        Column(None, lambda group: bias(group) if first("is_unbiased")(group) is True else None,
               name="share of bias if unbiased", in_csv=False),
    ),
    reference={"method": "mean_bfloat16"},
)  # fmt: skip


def frontier(lines: Sequence[Line]) -> list[Line]:
    """The lines that no other line beats: lower in error or bits, and not higher in the other."""
    costs = {id(e): (e["bits_per_coordinate"], max(e["error"].mean, EXACT)) for e in lines}

    def is_beaten(x: float, y: float) -> bool:
        return any(a <= x and b <= y and (a, b) != (x, y) for a, b in costs.values())

    best = [line for line in lines if line["error"].mean < 1 and not is_beaten(*costs[id(line)])]
    return sorted(best, key=lambda line: costs[id(line)])


def prose(results: Results) -> list[str]:
    config, run = results.config, results.lines[0].group.runs[0]
    workers, size = run.get("workers", 8), run.get("coordinates", 10_858)
    return [
        f"digits, {workers} workers, {size:,} coordinates: the gradients of step "
        f"{', '.join(map(str, sorted({*config.steps})))} of one run of SGD with momentum and the "
        f"exact mean, {config.batch} examples per step, learning rate {LEARNING_RATE}; "
        f"{config.draws} draws of the rounding per step. The seeds of the record are these steps. "
        "The gradients follow from the seed.",
        PROVENANCE, TUNING, CLAIMS, TABLE,
        "The error is E‖G - mean‖² / ‖mean‖² of an estimate G, averaged over draws and then over "
        "steps; the next column is its range over steps. The share of bias is ‖E G - mean‖² over "
        "the error, the part that an average over more draws would not reduce: about 0 for "
        "unbiased rounding, 1 without random numbers. The prediction, for `global_qsgd:BITS`, is "
        "the variance of rounding at random to one of two levels. Bytes are those that a worker "
        "sends, as `jaxcomm.wire.account` counts. Bits are per coordinate; a float32 mean sends "
        f"{64 * (workers - 1) / workers:g}, and the ratio is to that. Errors up to {EXACT:.0e} are "
        "those of a float32 sum in another order. The estimate 0, which sends nothing, has an "
        "error of 1.",
        "No other method is better in both error and bits, from fewest bits to most: "
        f"{', '.join(f'`{line.where}`' for line in frontier(results.lines))}. These are gradients "
        "of one small network, which fits into one bucket. Methods differ in the number of "
        "coordinates per norm: all in `global_qsgd` and `qsgd`, 256 in `two_stage` and "
        "`mean_float8`. More coordinates per norm give more noise, so other sizes have other "
        "errors. The rounding of `terngrad` is unbiased, but the method first clips gradients at "
        "2.5 standard deviations.",
    ]  # fmt: skip


def mark_exact(axes: Any, results: Results, _: Any) -> None:
    exact = [line for line in results.lines if line["error"].mean <= EXACT]
    x = min((line["bits_per_coordinate"] for line in exact), default=math.nan)
    axes.axvline(x, color="black", linestyle=":", linewidth=1)
    text = f"exact: {', '.join(line.where for line in exact)}" if exact else ""
    axes.text(x, 0.02, text, transform=axes.get_xaxis_transform(), rotation=90, size=8)


ESTIMATE = Study(
    "estimate", Estimate, settings, train, ERRORS, prose,
    claims=(
        Claim("The bias of every unbiased method is from -1 % to 1 % of its error.",
              is_within("share of bias if unbiased", -0.01, 0.01)),
        Claim("The error of every `global_qsgd:BITS` is within 5 % of its formula.",
              is_within("error_of_predicted", 0.95, 1.05)),
        Claim("`global_qsgd:16` has a lower error than `mean_bfloat16` for the same bytes.",
              is_better("error", methods={"method": "global_qsgd:16"}, log=True)),
    ),
    figures=[Points(
        file="error_against_bits.png", by="method", size=(8.0, 6.0), finish=mark_exact,
        caption="Error against bits per coordinate, and its range over steps (crosses: controls)",
        x=(Axis("bits_per_coordinate", "bits sent per coordinate and worker"),),
        y=Axis("over steps", "E‖G - mean‖² / ‖mean‖²"),
        mark=lambda line: {"marker": "X" if first("is_control")(line.group) is True else "o"},
        joined=lambda line: line.where.partition(":")[0],
    )],
    seeds=lambda config: sorted({*config.steps}),
)  # fmt: skip
