"""Codecs and the references of `pallas_kernels` on this CPU, beside plain code that does as much.

Each table is a function of the size of the array and the number of timings, and returns its lines.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.bench.record import aligned
from experiments.timing import medians
from jaxcomm import Codec, Context, Keys, _noise
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sketches import s2_sketch
from pallas_kernels import count_sketch
from pallas_kernels.quantize import quantize

SIZE = 10_000_000
MAX_OF_PLAIN = 2.0
"""The limit of dithering, as a multiple of the fused line that does the same."""

MAX_NANOSECONDS = 1.5
"""The limit of one core per coordinate, to quantize to 8 bits."""

MAX_MILLISECONDS = 30.0
"""The limit to encode, and to decode, ten million coordinates with the mean of S2 Reducer."""

VECTOR_BITS = (256, 512)
"""XLA prefers the first on all x86 processors; the second is faster where it is available."""

Limits = Sequence[tuple[str, float, float]]

SKETCH_ROWS, COLUMNS = 3, 2**18
WIDTH, DENSITY, TOP = 64, 0.02, 0.01
WORKERS = 8
SPARSE = {
    "s2_sketch, mean": s2_sketch(density=DENSITY, sketch_ratio=1.0),
    "s2_sketch, peel, 3 rows": s2_sketch(density=DENSITY, sketch_ratio=1.4, rows=3, decode="peel"),
}


def _describe(title: str, seconds: Mapping[str, float], size: int, limits: Limits = ()) -> str:
    """A table of the times, and what is compared with a limit."""
    lines = [
        (name, f"{1e3 * each:.1f}", f"{1e9 * each / size:.3f}") for name, each in seconds.items()
    ]
    compared = [
        f"{what}: {value:.2f}, {'within' if value <= limit else 'ABOVE'} {limit:.2f}"
        for what, value, limit in limits
    ]
    return "\n".join([aligned((title, "ms", "ns/coordinate"), lines), *compared])


def _normal(size: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(size, np.float32))


def parts(codec: Codec, x: jax.Array, workers: int) -> dict[str, Callable[[], object]]:
    """The compiled parts, called as on one of several workers."""
    keys = Keys(*jax.random.split(jax.random.key(0)))
    context = Context(keys, jax.jit(codec.init)(x), workers=workers, shape=x.shape)
    measure = jax.jit(lambda x: codec.measure(context, x))
    encode = jax.jit(lambda x, found: codec.encode(context.replace(statistics=found), x)[0])
    decode = jax.jit(
        lambda payload, found: codec.decode(context.received().replace(statistics=found), payload)
    )
    found = measure(x)
    payload = encode(x, found)
    return {
        "measure": lambda: measure(x),
        "encode": lambda: encode(x, found),
        "decode": lambda: decode(payload, found),
    }


def dither_table(size: int = SIZE, repetitions: int = 9) -> str:
    """8-bit dithering, and one fused line of `jnp` that does the same or less."""
    x, key = _normal(size), jax.random.key(0)

    @jax.jit
    def floor(key, x, scale):
        noise = (_noise.bits(key, x.shape) >> 8).astype(jnp.float32) * 2.0**-24
        return jnp.floor(x * scale + noise).astype(jnp.int8)

    multiply = jax.jit(lambda codes, scale: codes.astype(jnp.float32) * scale)
    scale = 127 / jnp.max(jnp.abs(x))
    codes = floor(key, x, scale)
    plain = {"encode": lambda: floor(key, x, scale), "decode": lambda: multiply(codes, 1 / scale)}
    runs = parts(dither(bits=8), x, workers=1)
    seconds = medians(runs | {f"{name}, one line": run for name, run in plain.items()}, repetitions)
    limits = [
        (f"{name} over one line", seconds[name] / seconds[f"{name}, one line"], MAX_OF_PLAIN)
        for name in plain
    ]
    return _describe(f"8-bit dithering of {size:,} float32", seconds, size, limits)


def quantize_table(size: int = SIZE, repetitions: int = 9) -> str:
    """The reference of `quantize` to 8 bits, in seconds summed over cores."""
    x, seeds = _normal(size), jnp.array([1, 2], jnp.uint32)
    arguments = x, jnp.max(jnp.abs(x)), seeds
    runs = {}
    for bits in VECTOR_BITS:
        encode = jax.jit(
            lambda *given: quantize(*given, levels=127, bits=8, implementation="reference"),
            compiler_options={"xla_cpu_prefer_vector_width": bits},
        )
        runs[f"vectors of {bits} bits"] = functools.partial(encode, *arguments)
    seconds = medians(runs, repetitions, time.process_time)
    limits = [
        (f"{name}, ns of a core", 1e9 * each / size, MAX_NANOSECONDS)
        for name, each in seconds.items()
    ]
    return _describe(f"quantizing {size:,} float32 to 8 bits", seconds, size, limits)


def sketch_table(size: int = 2**24, repetitions: int = 3) -> str:
    """The references of sketches with both families of hashes, and scatters to known columns."""
    x, seeds = _normal(size), jnp.array([1, 2], jnp.uint32)
    generator = np.random.default_rng(1)
    columns = generator.integers(0, COLUMNS, (SKETCH_ROWS, size), np.int32)
    signed = np.where(generator.random((SKETCH_ROWS, size), np.float32) < 0.5, -x, x)
    on_device = jnp.asarray(columns), jnp.asarray(signed)

    def sketch(hashing):
        encode = functools.partial(
            count_sketch.encode,
            rows=SKETCH_ROWS,
            columns=COLUMNS,
            hashing=hashing,
            implementation="reference",
        )
        return functools.partial(jax.jit(encode), x, seeds)

    def scatter_numpy():
        table = np.zeros((SKETCH_ROWS, COLUMNS), np.float32)
        for row in range(SKETCH_ROWS):
            np.add.at(table[row], columns[row], signed[row])
        return table

    @jax.jit
    def scatter(columns, signed):
        table = jnp.zeros((SKETCH_ROWS, COLUMNS), jnp.float32)
        for row in range(SKETCH_ROWS):
            table = table.at[row, columns[row]].add(signed[row])
        return table

    seconds = medians(
        {
            **{f'hashing="{name}"': sketch(name) for name in ("tiles", "elements")},
            "jnp .at[].add, precomputed columns": lambda: scatter(*on_device),
            "numpy.add.at, precomputed columns": scatter_numpy,
        },
        repetitions,
    )
    title = f"sketch of {size:,} float32, {SKETCH_ROWS} rows of {COLUMNS:,} columns"
    return _describe(title, seconds, size)


def sparse_leaf(size: int) -> jax.Array:
    """float32[rows, 64] with about `size` coordinates and 2 % nonzero rows."""
    generator = np.random.default_rng(0)
    rows = size // WIDTH
    touched = generator.choice(rows, round(DENSITY * rows), replace=False)
    leaf = np.zeros((rows, WIDTH), np.float32)
    leaf[touched] = generator.standard_normal((len(touched), WIDTH), np.float32)
    return jnp.asarray(leaf)


def sparse_table(size: int = SIZE, repetitions: int = 9) -> str:
    """Codecs of an update with few nonzero rows, and `jax.lax.top_k` of the same in turn."""
    x = sparse_leaf(size)
    largest = jax.jit(lambda x: lax.top_k(jnp.abs(x.ravel()), round(TOP * x.size)))
    runs = {"top_k": lambda: largest(x)}
    for name, codec in SPARSE.items():
        runs |= {f"{name}: {part}": run for part, run in parts(codec, x, WORKERS).items()}
    seconds = medians(runs, repetitions)
    limits = [
        (f"{part}, ms", 1e3 * seconds[part], MAX_MILLISECONDS)
        for part in ("s2_sketch, mean: encode", "s2_sketch, mean: decode")
    ]
    peel = sum(each for name, each in seconds.items() if name.startswith("s2_sketch, peel"))
    limits.append(("s2_sketch, peel, ms beside top_k", 1e3 * peel, 1e3 * seconds["top_k"]))
    title = f"{size:,} float32, {DENSITY:.0%} nonzero rows of {WIDTH}, top_k of {TOP:.0%}"
    return _describe(title, seconds, size, limits)


TABLES = (dither_table, quantize_table, sketch_table, sparse_table)
