"""Times the references of `pallas_kernels` on the CPU, and simple code."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from experiments.study.table import to_rich
from experiments.training.timing import medians
from pallas_kernels import count_sketch
from pallas_kernels.quantize import quantize

MAX_NANOSECONDS = 1.5
"""The limit of one core per coordinate, to quantize to 8 bits."""

VECTOR_BITS = (256, 512)
"""XLA prefers the first on all x86 processors; the second is faster where it is available."""

ROWS, COLUMNS = 3, 2**18


def _normal(size: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(size, np.float32))


def core_seconds(function: Callable[[], object], repetitions: int) -> float:
    """Median CPU seconds of `function`, summed over cores."""
    jax.block_until_ready(function())  # Compiles.
    seconds = []
    for _ in range(repetitions):
        start = time.process_time()
        jax.block_until_ready(function())
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def time_quantize(size: int, repetitions: int) -> dict[int, float]:
    """Median CPU seconds to quantize `size` float32 to 8 bits, by vector width."""
    x, seeds = _normal(size), jnp.array([1, 2], jnp.uint32)
    scale = jnp.max(jnp.abs(x))

    def seconds(vector_bits: int) -> float:
        encode = jax.jit(
            lambda x, scale, seeds: quantize(
                x, scale, seeds, levels=127, bits=8, implementation="reference"
            ),
            compiler_options={"xla_cpu_prefer_vector_width": vector_bits},
        )
        return core_seconds(lambda: encode(x, scale, seeds), repetitions)

    return {bits: seconds(bits) for bits in VECTOR_BITS}


def time_sketch(size: int, repetitions: int) -> dict[str, float]:
    """Median wall-clock seconds to encode `size` float32 as a sketch.

    With both families of hashes, and with scatters to precomputed columns.
    """
    x, seeds = _normal(size), jnp.array([1, 2], jnp.uint32)
    generator = np.random.default_rng(1)
    columns = generator.integers(0, COLUMNS, (ROWS, size), np.int32)
    signed = np.where(generator.random((ROWS, size), np.float32) < 0.5, -x, x)

    def encode(hashing: Literal["tiles", "elements"]) -> jax.stages.Wrapped:
        return jax.jit(
            lambda x, seeds: count_sketch.encode(
                x,
                seeds,
                rows=ROWS,
                columns=COLUMNS,
                hashing=hashing,
                implementation="reference",
            )
        )

    def scatter_numpy() -> np.ndarray:
        table = np.zeros((ROWS, COLUMNS), np.float32)
        for row in range(ROWS):
            np.add.at(table[row], columns[row], signed[row])
        return table

    @jax.jit
    def scatter(columns: jax.Array, signed: jax.Array) -> jax.Array:
        table = jnp.zeros((ROWS, COLUMNS), jnp.float32)
        for row in range(ROWS):
            table = table.at[row, columns[row]].add(signed[row])
        return table

    tiles, elements = encode("tiles"), encode("elements")
    on_device = jnp.asarray(columns), jnp.asarray(signed)
    return medians(
        {
            'hashing="tiles"': lambda: tiles(x, seeds),
            'hashing="elements"': lambda: elements(x, seeds),
            "jnp .at[].add, precomputed columns": lambda: scatter(*on_device),
            "numpy.add.at, precomputed columns": scatter_numpy,
        },
        repetitions,
    )


def verdict(seconds: float, size: int, vector_bits: int) -> str:
    """Whether quantization is within its limit."""
    nanoseconds = 1e9 * seconds / size
    result = "within" if nanoseconds <= MAX_NANOSECONDS else "ABOVE"
    return (
        f"pallas_kernels.quantize, reference, 8 bits, vectors of {vector_bits}: "
        f"{nanoseconds:.2f} ns of one core per coordinate, {result} {MAX_NANOSECONDS:g}"
    )


def to_table(seconds: Mapping[str, float], size: int) -> Table:
    """Nanoseconds per coordinate of each way to encode a sketch, and multiples of the first."""
    title = f"sketch of {size:,} float32, {ROWS} rows of {COLUMNS:,} columns"
    first = next(iter(seconds.values()))
    lines = [
        (name, f"{1e9 * median / size:.1f}", f"{median / first:.2f}")
        for name, median in seconds.items()
    ]
    return to_rich(("encode", "ns/coordinate", "times tiles"), lines, title=title)
