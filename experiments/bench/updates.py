"""Times whole updates of one worker on one core, and the simplest compression.

`experiments.bench.timing` calls it in a process that is pinned to one core. In a process that has
already used JAX, other threads would do a part of the work.
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

import jaxcomm

LAYERS = 10
CALLS = 3


class BenchMethod(NamedTuple):
    """A method, and the largest multiple of the baseline that its update should take."""

    build: Callable[[], optax.GradientTransformation]
    goal: float | None = None


def gradients(side: int) -> dict[str, jax.Array]:
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


def fastest(runs: Mapping[str, Run], rounds: int) -> dict[str, float]:
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


def prepare_runs(methods: Mapping[str, BenchMethod], side: int) -> tuple[dict[str, Run], int]:
    """The functions for `fastest`, the baseline and all methods, and the number of coordinates."""
    updates = gradients(side)
    runs = {"baseline": _make_run(baseline, updates, ())}
    runs |= {name: whole_update(each.build(), updates) for name, each in methods.items()}
    return runs, sum(x.size for x in updates.values())


def share_one_core() -> None:
    """Pins all threads of this process to one core, if the system supports it."""
    if hasattr(os, "sched_setaffinity"):  # Linux.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
