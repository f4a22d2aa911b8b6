"""Times codecs of sparse updates and `jax.lax.top_k`, on a leaf with few nonzero rows."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.table import Table

import jaxcomm
from experiments.study.table import to_rich
from experiments.training.timing import medians
from jaxcomm.compression.sketches import s2_codes, s2_sketch
from jaxcomm.compression.sparsifiers import nonzero, nonzero_union

WIDTH = 64
DENSITY = 0.02
TOP = 0.01
MAX_MILLISECONDS = 30.0
"""The limit to encode, and to decode, ten million coordinates with the mean."""

WORKERS = 8

CODECS: dict[str, jaxcomm.Codec] = {
    "s2_sketch, mean": s2_sketch(density=DENSITY, sketch_ratio=1.0),
    "s2_sketch, median of 3 rows": s2_sketch(
        density=DENSITY, sketch_ratio=1.0, rows=3, decode="median"
    ),
    "s2_sketch, peel, 3 rows": s2_sketch(density=DENSITY, sketch_ratio=1.4, rows=3, decode="peel"),
    "s2_codes, 8 bits, peel": s2_codes(density=DENSITY, sketch_ratio=1.4),
    "nonzero_union": nonzero_union(density=DENSITY),
    "nonzero": nonzero(density=DENSITY),
}


class Timing(NamedTuple):
    """Median seconds per part."""

    measure: float  # The bitmap, before its reduction over workers.
    encode: float
    decode: float

    @property
    def total(self) -> float:
        """The sum of the three parts."""
        return sum(self)


def sparse_leaf(size: int) -> jax.Array:
    """float32[rows, 64] with about `size` coordinates and 2 % nonzero rows."""
    generator = np.random.default_rng(0)
    rows = max(size // WIDTH, 1)
    touched = generator.choice(rows, max(round(DENSITY * rows), 1), replace=False)
    leaf = np.zeros((rows, WIDTH), np.float32)
    leaf[touched] = generator.standard_normal((len(touched), WIDTH), np.float32)
    return jnp.asarray(leaf)


def _parts(codec: jaxcomm.Codec, x: jax.Array) -> dict[str, Callable[[], object]]:
    """The compiled parts, called as `all_reduce_mean` does on one of eight workers."""
    coins = jaxcomm.Coins(*jax.random.split(jax.random.key(0)))
    workers = WORKERS if codec.combine == "sum" else 1
    memory = jax.jit(codec.init)(x)
    context = jaxcomm.Context(coins, memory, workers=workers, shape=x.shape)
    measure = jax.jit(lambda x: codec.measure(context, x))
    statistics = measure(x)
    encode = jax.jit(
        lambda x, statistics: codec.encode(context.replace(statistics=statistics), x)[0]
    )
    payload = encode(x, statistics)
    decode = jax.jit(
        lambda p, statistics: codec.decode(context.received().replace(statistics=statistics), p)
    )
    return {
        "measure": lambda: measure(x),
        "encode": lambda: encode(x, statistics),
        "decode": lambda: decode(payload, statistics),
    }


def time_sparse(
    size: int, repetitions: int, codecs: Mapping[str, jaxcomm.Codec] = CODECS
) -> tuple[dict[str, Timing], float]:
    """Times each codec, and `jax.lax.top_k` of 1 % of the same leaf in the same rounds."""
    x = sparse_leaf(size)
    largest = jax.jit(lambda x: lax.top_k(jnp.abs(x.ravel()), max(round(TOP * x.size), 1)))
    parts = {
        (name, part): function
        for name, codec in codecs.items()
        for part, function in _parts(codec, x).items()
    }
    seconds = medians(
        {"top_k": lambda: largest(x)} | {" / ".join(pair): f for pair, f in parts.items()},
        repetitions,
    )
    timings = {
        name: Timing(*(seconds[f"{name} / {part}"] for part in Timing._fields)) for name in codecs
    }
    return timings, seconds["top_k"]


def verdicts(timings: Mapping[str, Timing], top_k: float) -> list[str]:
    """Whether the mean and peeling are within their limits."""
    mean, peel = timings["s2_sketch, mean"], timings["s2_sketch, peel, 3 rows"]
    slowest = 1e3 * max(mean.encode, mean.decode)
    return [
        f"S2 Reducer, mean: encode {1e3 * mean.encode:.1f} ms, decode {1e3 * mean.decode:.1f} ms, "
        f"{'within' if slowest <= MAX_MILLISECONDS else 'ABOVE'} {MAX_MILLISECONDS:g}",
        f"S2 Reducer, peel: in total {1e3 * peel.total:.0f} ms, "
        f"{'within' if peel.total <= top_k else 'ABOVE'} the {1e3 * top_k:.0f} of jax.lax.top_k",
    ]


def to_table(timings: Mapping[str, Timing], top_k: float, size: int) -> Table:
    """Milliseconds per part, and their sum over the time of `top_k`."""
    title = (
        f"{size:,} float32, {100 * DENSITY:g} % nonzero rows of {WIDTH}; "
        f"jax.lax.top_k of {100 * TOP:g} % takes {1e3 * top_k:.0f} ms"
    )
    lines = [
        (name, *(f"{1e3 * seconds:.1f}" for seconds in timing), f"{timing.total / top_k:.2f}")
        for name, timing in timings.items()
    ]
    headings = ("codec", "bitmap ms", "encode ms", "decode ms", "of lax.top_k")
    return to_rich(headings, lines, title=title)
