"""The rows of the bench, and the time of their whole updates by one worker on one core.

`python -m experiments.bench.updates SIDE REPEATS NAME...` prints them as JSON. It is a process of
its own, pinned to a core: threads of one that has used JAX would do a part of the work.
"""

import functools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

import jaxcomm
from experiments.errors import ExperimentError
from experiments.trainer import make_mesh
from jaxcomm.catalogue import LARGE, METHODS

LAYERS = 10
GROUP = 6  # Rows with a common baseline, which are in memory at the same time.
ROUNDS = 2  # Per repeat.
CALLS = 3


ROWS = {
    name: functools.partial(method.build, LARGE)
    for name, method in METHODS.items()
    if method.family != "around"  # They send what goes through them.
}
FAMILY = {name: METHODS[name].family for name in ROWS}
PER_WORKER = {name for name, method in METHODS.items() if method.kind in ("local", "gossip")}
"""Rows with parameters per worker. They mix those of several workers, so one cannot run them."""

GOALS = {
    "global_qsgd_8_bits": 2.5,
    "global_qsgd_exponential": 6,
    "qsgd": 3,
    "two_stage_8_bits": 4,
    "two_stage_4_bits": 6,
    "signum": 4,
    "ef_sign_sgd": 4,
    "terngrad": 5,
    "natural_compression": 4,
    "top_k_sgd": 15,
    "variance_based": 8,
    "gtop_k": 18,
    "deep_gradient_compression": 20,
}
"""The largest multiple of the baseline that an update should take."""

Run = Callable[[], None]


def gradients(side: int) -> dict[str, jax.Array]:
    """Normal gradients of square layers and their biases."""
    draw = np.random.default_rng(0).standard_normal
    return {
        f"layer {layer}, {name}": jnp.asarray(draw(shape, np.float32))
        for layer in range(LAYERS)
        for name, shape in (("weights", (side, side)), ("biases", (side,)))
    }


@functools.partial(jax.jit, donate_argnums=1)
def baseline(updates: Any, state: Any) -> Any:
    """Rounds each leaf to 255 levels of its largest magnitude as int8, and decodes it."""

    def round_trip(x):
        scale = jnp.max(jnp.abs(x)) / 127
        codes = lax.optimization_barrier(jnp.round(x / scale).astype(jnp.int8))
        return codes.astype(x.dtype) * scale

    return jax.tree.map(round_trip, updates), state


def _repeated(update: Callable, updates: Any, state: Any) -> Run:
    """A function that calls `update` once and keeps the state for the next call."""

    def run():
        nonlocal state
        result, state = update(updates, state)
        jax.block_until_ready((result, state))

    return run


def _whole_update(tx: optax.GradientTransformation, updates: Any) -> Run:
    """`tx.update` on a mesh of one worker."""
    mesh = make_mesh(1)
    state = jaxcomm.init(tx, updates, mesh)
    specs, local = jaxcomm.state_specs(state), PartitionSpec("data")
    update = jax.shard_map(
        lambda updates, state: tx.update(jax.tree.map(lambda x: x[0], updates), state),
        mesh=mesh,
        in_specs=(local, specs),
        out_specs=(PartitionSpec(), specs),
    )
    rows = jax.tree.map(lambda x: x[None], updates)
    return _repeated(jax.jit(update, donate_argnums=1), rows, state)


def time_group(names: Sequence[str], side: int, repeats: int) -> dict[str, list[float]]:
    """The least nanoseconds per coordinate of each row and of the baseline, in each repeat.

    Of three calls, the last is timed. The others warm up the memory: after another function has
    freed its buffers, buffers of 32 MiB and more are mapped again, page by page.
    """
    updates = gradients(side)
    size = sum(x.size for x in updates.values())
    runs = {"baseline": _repeated(baseline, updates, ())}
    runs |= {name: _whole_update(ROWS[name](), updates) for name in names}
    least = {name: [math.inf] * repeats for name in runs}
    for repeat in range(ROUNDS * repeats):
        for name, run in runs.items():
            for _ in range(CALLS):
                began = time.perf_counter()
                run()
                taken = 1e9 * (time.perf_counter() - began) / size
            least[name][repeat // ROUNDS] = min(least[name][repeat // ROUNDS], taken)
    return least


def time_in_subprocess(
    names: Sequence[str], side: int, repeats: int
) -> dict[str, tuple[list[float], list[float]]]:
    """The times of each row, and those of the baseline of its group.

    Raises:
      ExperimentError: If the subprocess fails; it prints the reason to the standard error.
    """
    command = [sys.executable, "-m", __name__, str(side), str(repeats), *names]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise ExperimentError(f"the subprocess that times updates ended with {ended.returncode}.")
    return json.loads(ended.stdout)


def main(side: str, repeats: str, *names: str) -> None:
    """Prints the results that `time_in_subprocess` reads."""
    if hasattr(os, "sched_setaffinity"):  # Linux.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    times = {}
    for first in range(0, len(names), GROUP):
        group = time_group(names[first : first + GROUP], int(side), int(repeats))
        print("timed", *group, file=sys.stderr, flush=True)
        times |= {name: (each, group["baseline"]) for name, each in group.items()}
    print(json.dumps(times))


if __name__ == "__main__":
    main(*sys.argv[1:])
