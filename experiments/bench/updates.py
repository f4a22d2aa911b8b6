"""Times whole updates of one worker on one core, as multiples of the simplest compression.

`python -m experiments.bench.updates` pins itself to one core. In a process that has already used
JAX, other threads would do a part of the work.
"""

import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from rich.console import Console
from rich.table import Table

import jaxcomm
from jaxcomm.aggregation import all_gather_mean, gtop_k, two_stage_mean
from jaxcomm.compression import blockwise
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k, variance_based

LAYERS, SIDE = 10, 1024
ROUNDS, CALLS = 6, 3
RATIO = 0.01


class BenchMethod(NamedTuple):
    """A method, and the largest multiple of the baseline that its update should take."""

    build: Callable[[], optax.GradientTransformation]
    goal: float | None = None


METHODS_WITH_GOALS: Mapping[str, BenchMethod] = {
    "mean": BenchMethod(jaxcomm.mean),
    "global_qsgd, 8 bits": BenchMethod(lambda: jaxcomm.global_qsgd(bits=8), 2.5),
    "qsgd": BenchMethod(jaxcomm.qsgd, 3),
    "two stages, 8 bits": BenchMethod(lambda: two_stage_mean("data", dither(bits=8)), 4),
    "two stages, blocks of 4 bits": BenchMethod(
        lambda: two_stage_mean("data", blockwise(dither(bits=4), 256)), 6
    ),
    "global_qsgd, exponential": BenchMethod(
        lambda: jaxcomm.global_qsgd(dithering="exponential"), 6
    ),
    "ef_sign_sgd": BenchMethod(jaxcomm.ef_sign_sgd, 4),
    "signum": BenchMethod(jaxcomm.signum, 4),
    "terngrad": BenchMethod(jaxcomm.terngrad, 5),
    "natural_compression": BenchMethod(jaxcomm.natural_compression, 4),
    "top-k with feedback": BenchMethod(
        lambda: all_gather_mean("data", error_feedback(top_k(ratio=RATIO))), 15
    ),
    "gtop_k": BenchMethod(lambda: gtop_k("data", ratio=RATIO), 18),
    "deep_gradient_compression": BenchMethod(
        lambda: jaxcomm.deep_gradient_compression(ratio=RATIO), 20
    ),
    "variance_based": BenchMethod(lambda: all_gather_mean("data", variance_based(ratio=RATIO)), 8),
}


def gradients(side: int = SIDE) -> dict[str, jax.Array]:
    """Normal gradients of square layers and their biases."""
    draw = np.random.default_rng(0).standard_normal
    shapes = {"weights": (side, side), "biases": (side,)}
    return {
        f"layer {layer}, {name}": jnp.asarray(draw(shape, np.float32))
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }


@functools.partial(jax.jit, donate_argnums=1)
def baseline(updates: Any, state: Any) -> tuple[Any, Any]:
    """Rounds each leaf to 255 levels of its largest magnitude as int8, and decodes it."""

    def round_trip(x: jax.Array) -> jax.Array:
        scale = jnp.max(jnp.abs(x)) / 127
        codes = lax.optimization_barrier(jnp.round(x / scale).astype(jnp.int8))
        return codes.astype(x.dtype) * scale

    return jax.tree.map(round_trip, updates), state


Run = Callable[[], None]


def _make_run(update: Callable[[Any, Any], tuple[Any, Any]], updates: Any, state: Any) -> Run:
    """A function that calls `update` once and keeps the state for the next call."""

    def run() -> None:
        nonlocal state
        result, state = update(updates, state)
        jax.block_until_ready((result, state))

    return run


def whole_update(tx: optax.GradientTransformation, updates: Any) -> Run:
    """`tx.update` on a mesh of one worker."""
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    state = jaxcomm.init(tx, updates, mesh)
    specs, local = jaxcomm.state_specs(state), PartitionSpec("data")

    def update(updates: Any, state: Any) -> tuple[Any, Any]:
        local_updates = jax.tree.map(lambda x: x[0], updates)
        return tx.update(local_updates, state)

    sharded = jax.shard_map(
        update, mesh=mesh, in_specs=(local, specs), out_specs=(PartitionSpec(), specs)
    )
    rows = jax.tree.map(lambda x: x[None], updates)
    return _make_run(jax.jit(sharded, donate_argnums=1), rows, state)


def fastest(runs: Mapping[str, Run], rounds: int = ROUNDS) -> dict[str, float]:
    """The minimum seconds of each function. In each round, the last of three calls is timed.

    The first two calls warm up the memory: after another function has freed its buffers, buffers of
    32 MiB and more are mapped again, page by page.
    """
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            for _ in range(CALLS):
                began = time.perf_counter()
                run()
                seconds = time.perf_counter() - began
            least[name] = min(least[name], seconds)
    return least


def prepare_runs(
    methods: Mapping[str, BenchMethod], side: int = SIDE
) -> tuple[dict[str, Run], int]:
    """The functions for `fastest`, the baseline and all methods, and the number of coordinates."""
    updates = gradients(side)
    runs = {"baseline": _make_run(baseline, updates, ())}
    runs |= {name: whole_update(each.build(), updates) for name, each in methods.items()}
    return runs, sum(x.size for x in updates.values())


def measure(
    methods: Mapping[str, BenchMethod] = METHODS_WITH_GOALS,
    side: int = SIDE,
) -> tuple[dict[str, float], int]:
    """Minimum seconds of the baseline and of all methods, and the number of coordinates."""
    runs, size = prepare_runs(methods, side)
    return fastest(runs), size


def to_table(seconds: Mapping[str, float], size: int) -> Table:
    """Nanoseconds per coordinate, and multiples of the baseline with their goals."""
    table = Table(title=f"whole updates of {size:,} coordinates, one worker, one core")
    for heading in ("method", "ns/coordinate", "of the baseline", "goal"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for name, least in seconds.items():
        goal = METHODS_WITH_GOALS[name].goal if name in METHODS_WITH_GOALS else None
        table.add_row(
            name,
            f"{1e9 * least / size:.2f}",
            f"{least / seconds['baseline']:.1f}",
            "" if goal is None else f"{goal:g}",
        )
    return table


def share_one_core() -> None:
    """Pins all threads of this process to one core, if the system supports it."""
    if hasattr(os, "sched_setaffinity"):  # Linux.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


if __name__ == "__main__":
    share_one_core()
    Console(width=100).print(to_table(*measure()))
