"""Time of codecs and ops beside the plainest code that does the same or less, and of steps."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.table import Table

import jaxcomm
from experiments import bench_ops, bench_programs, bench_sparse, bench_updates, bench_windows
from experiments.bench_codecs import time_codecs, to_table
from experiments.configs import Bench
from experiments.methods import parse_variant
from experiments.progress import Progress
from experiments.timing import medians
from experiments.train import make_mesh
from jaxcomm import _noise
from jaxcomm.compression.quantizers import dither

MOST_RATIO = 2.0
METHODS = ("mean", "global_qsgd:8", "global_qsgd:16", "qsgd")


def _uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Numbers in [0, 1) from the same counter hash that the codec draws from."""
    return (_noise.bits(key, shape) >> 8).astype(jnp.float32) * 2.0**-24


def time_codec(size: int, repetitions: int) -> dict[str, float]:
    """Median seconds of each pass over `size` float32 coordinates on one device."""
    codec, levels = dither(bits=8), 127
    x = jnp.asarray(np.random.default_rng(0).standard_normal(size, np.float32))
    key = jax.random.key(0)
    context = jaxcomm.Context(jaxcomm.Coins(key, key), shape=x.shape)

    measure = jax.jit(lambda x: codec.measure(context, x))
    encode = jax.jit(lambda context, x: codec.encode(context, x)[0])
    decode = jax.jit(codec.decode)
    floor_hashed = jax.jit(
        lambda key, x, scale: jnp.floor(x * scale + _uniform(key, x.shape)).astype(jnp.int8)
    )
    floor_given = jax.jit(lambda noise, x, scale: jnp.floor(x * scale + noise).astype(jnp.int8))
    multiply = jax.jit(lambda codes, scale: codes.astype(jnp.float32) * scale)

    norm = measure(x)
    known = context.replace(agreed=norm)
    payload = encode(known, x)
    scale = levels / norm.max_abs
    noise = jax.jit(_uniform, static_argnums=1)(key, x.shape)
    return medians(
        {
            "measure": lambda: measure(x),
            "encode": lambda: encode(known, x),
            "encode, floor with hashed noise": lambda: floor_hashed(key, x, scale),
            "encode, floor with noise given": lambda: floor_given(noise, x, scale),
            "decode": lambda: decode(known, payload),
            "decode, multiply": lambda: multiply(payload.codes, 1 / scale),
        },
        repetitions,
    )


def time_steps(
    parameters: int, repetitions: int, devices: int | None
) -> dict[str, tuple[float, float]]:
    """Median seconds of a step of each method, and the bytes that a worker sends in it.

    A worker's gradient is its row of the batch, so that all but the exchange costs little.
    """
    mesh = make_mesh(devices)
    rows = np.random.default_rng(0).standard_normal((mesh.size, parameters), np.float32)
    measured = {}
    for label in METHODS:
        tx = optax.chain(parse_variant(label).build(0), optax.sgd(1e-3))
        step = jaxcomm.make_step(lambda w, row: jnp.vdot(w, row[0]), tx, mesh)
        params = jnp.zeros(parameters)
        state = params, jaxcomm.init(tx, params, mesh)
        batch = jax.device_put(
            rows, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        )
        sent = jaxcomm.wire.account(step, *state, batch).bytes_per_worker

        def advance(step: Any = step, batch: Any = batch) -> Any:
            nonlocal state
            *state, metrics = step(*state, batch)
            return state, metrics

        measured[label] = medians({label: advance}, repetitions)[label], sent
    return measured


def _codec_table(seconds: Mapping[str, float], size: int) -> Table:
    table = Table(title=f"8-bit dithering of {size:,} float32, one {jax.devices()[0].device_kind}")
    for heading in ("pass", "ns/coordinate", "codec / this"):
        table.add_column(heading, justify="left" if heading == "pass" else "right")
    for name, median in seconds.items():
        base, comma, _ = name.partition(",")
        ratio = f"{seconds[base] / median:.2f}" if comma else ""
        table.add_row(name, f"{1e9 * median / size:.3f}", ratio)
    return table


def _step_table(steps: Mapping[str, tuple[float, float]], parameters: int, workers: int) -> Table:
    table = Table(title=f"one step, {parameters:,} parameters, {workers} workers")
    for heading in ("method", "ms/step", "bytes/worker/step"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for label, (median, sent) in steps.items():
        table.add_row(label, f"{1e3 * median:.1f}", f"{sent:,.0f}")
    return table


def main(config: Bench) -> int:
    """Measures, as `python -m experiments bench` asks; the exit code."""
    workers = make_mesh(config.devices).size
    with Progress(8) as progress:
        progress.say(f"JAX {jax.__version__}, {jax.default_backend()}")
        codec = time_codec(config.coordinates, config.repetitions)
        progress.advance(1, "timed 8-bit dithering; the ops next")
        quantize = bench_ops.time_quantize(config.coordinates, config.repetitions)
        sketch = bench_ops.time_sketch(config.sketch_coordinates, -(-config.repetitions // 3))
        progress.advance(2, "timed the ops; codecs of sparse updates next")
        sparse, top_k = bench_sparse.time_sparse(config.coordinates, config.repetitions)
        progress.advance(3, "timed the codecs of sparse updates; every codec next")
        every = time_codecs(config.codec_coordinates, config.repetitions)
        progress.advance(4, "timed the codecs; whole steps next")
        steps = time_steps(config.parameters, config.repetitions, config.devices)
        progress.advance(5, "timed the steps; simulated windows next")
        windows = {
            workers: bench_windows.time_windows(workers, config.windows)
            for workers in bench_windows.WORKERS
        }
        progress.advance(6, "timed the windows; compiled programs next")
        programs = bench_programs.measure(config.repetitions)
        progress.advance(7, "compiled the programs; whole updates next")
        updates = bench_updates.printed_by_a_process_of_its_own()
        progress.advance(8, "timed the updates")
        progress.say(_codec_table(codec, config.coordinates))
        ratios = {
            "encode": codec["encode"] / codec["encode, floor with hashed noise"],
            "decode": codec["decode"] / codec["decode, multiply"],
        }
        for name, ratio in ratios.items():
            kept = "within" if ratio <= MOST_RATIO else "BEYOND"
            progress.say(f"{name}: {ratio:.2f} times the plain code, {kept} {MOST_RATIO:g}")
        for vector_bits, seconds in quantize.items():
            progress.say(bench_ops.verdict(seconds, config.coordinates, vector_bits))
        progress.say(bench_ops.to_table(sketch, config.sketch_coordinates))
        for line in bench_sparse.verdicts(sparse, top_k):
            progress.say(line)
        progress.say(bench_sparse.to_table(sparse, top_k, config.coordinates))
        progress.say(to_table(every, config.codec_coordinates))
        progress.say(_step_table(steps, config.parameters, workers))
        progress.say(bench_windows.to_table(windows, config.windows))
        progress.say(bench_windows.verdict(windows, config.windows))
        progress.say(programs)
        progress.say(updates)
    return 0
