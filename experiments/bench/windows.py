"""Times simulated windows of many workers: training, clock and batches."""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.table import Table

import jaxcomm
from experiments.study.table import to_rich
from experiments.tasks.data import load
from experiments.tasks.losses import CROSS_ENTROPY
from experiments.tasks.models import ConvolutionalNetwork
from jaxcomm import synchronization

WORKERS = (64, 256, 1024)
MINIBATCHES, SIZE, EXAMPLES = 4, 4, 32
MAX_SECONDS, GOAL_WINDOWS = 300.0, 1000
"""The limit for this number of windows, with the most workers."""


class Timing(NamedTuple):
    """The results of a run of windows."""

    parameters: int
    seconds: float
    loss: float


def time_windows(workers: int, windows: int) -> Timing:
    """Times compiled windows of a reduced version of the demo's network on digits.

    The fastest worker closes a window; times are exponential.
    """
    data, rng = load("digits", None), np.random.default_rng(0)
    network = ConvolutionalNetwork(peak=16.0, channels=2, hidden=192)
    rows = rng.integers(0, len(data.train_inputs), (workers, EXAMPLES))
    shards = jnp.asarray(data.train_inputs[rows]), jnp.asarray(data.train_labels[rows])
    params = network.init(jax.random.key(0), data.train_inputs[:1])["params"]

    def loss(params: Any, batch: Any) -> jax.Array:
        images, labels = batch
        return jnp.mean(CROSS_ENTROPY.per_label(network.apply({"params": params}, images), labels))

    tx = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
    step = jaxcomm.simulate(loss, tx, workers, gradients=synchronization.window_gradients)
    start, close = synchronization.windows(
        synchronization.shifted_exponential(mean=1.0),
        synchronization.fastest_worker(),
        workers=workers,
        minibatches=MINIBATCHES,
        in_flight="abort",
    )
    key = jax.random.key(0)

    @jax.jit
    def run(params: Any, state: Any) -> Any:
        def body(carry: Any, _: None) -> Any:
            params, state, clock = carry
            window, clock = close(clock)
            batch = synchronization.window_batches(
                key, shards, window.first, minibatches=MINIBATCHES, batch_size=SIZE
            )
            params, state, metrics = step(params, state, (batch, window.finished))
            return (params, state, clock), metrics["loss"]

        return jax.lax.scan(body, (params, state, start), length=windows)[1]

    arguments = params, jaxcomm.init(tx, params, workers)
    compiled = run.lower(*arguments).compile()
    began = time.perf_counter()
    losses = jax.block_until_ready(compiled(*arguments))
    parameters = sum(x.size for x in jax.tree.leaves(params))
    return Timing(parameters, time.perf_counter() - began, float(losses[-1]))


def to_table(timings: dict[int, Timing], windows: int) -> Table:
    """For the terminal."""
    parameters = next(iter(timings.values())).parameters
    title = (
        f"{windows} simulated windows of {MINIBATCHES} mini-batches of {SIZE} images, "
        f"{parameters:,} parameters"
    )
    lines = []
    for workers, timing in timings.items():
        each = timing.seconds / windows
        times = f"{1e3 * each:.1f}", f"{1e6 * each / workers:.0f}"
        lines.append((f"{workers:,}", *times, f"{timing.loss:.3f}"))
    headings = ("workers", "ms/window", "µs/window/worker", "loss")
    return to_rich(headings, lines, left=0, title=title)


def verdict(timings: dict[int, Timing], windows: int) -> str:
    """Whether the run with the most workers is within its limit."""
    workers = max(timings)
    seconds = timings[workers].seconds / windows * GOAL_WINDOWS
    within = "within" if seconds <= MAX_SECONDS else "ABOVE"
    return (
        f"{workers:,} workers: {seconds:.0f} s for {GOAL_WINDOWS:,} windows, {within} "
        f"{MAX_SECONDS:g} s"
    )
