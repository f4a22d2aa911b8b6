"""Time of `jit(encode)` of every codec, beside `jax.lax.top_k` and a copy."""

import functools
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.table import Table

import jaxcomm
from experiments.timing import medians
from jaxcomm.compression import blockwise, rotated
from jaxcomm.compression.feedback import diana, ecq, ef21, error_feedback, momentum_correction
from jaxcomm.compression.quantizers import (
    adaptive_levels,
    cast,
    dither,
    exponential_dither,
    fixed_threshold,
    min_max_dither,
    natural,
    nonzeros,
    one_bit,
    scaled_cast,
    scaled_signs,
    signs,
    ternary,
)
from jaxcomm.compression.sketches import count_sketch, s2_codes, s2_sketch
from jaxcomm.compression.sparsifiers import (
    ada_comp,
    adaptive_threshold,
    nonzero,
    nonzero_union,
    random_k,
    sbc,
    stc,
    threshold,
    top_k,
    variance_based,
    wangni,
)

RATIO = 0.01
BEYOND = 2.576  # What 1 % of normal numbers exceed.

CODECS: dict[str, jaxcomm.Codec] = {
    "cast": cast("bfloat16"),
    "scaled_cast": scaled_cast("float8_e4m3fn"),
    "dither, 8 bits": dither(bits=8),
    "dither, 4 bits": dither(bits=4),
    "blockwise dither, 4 bits": blockwise(dither(bits=4), 256),
    "exponential_dither": exponential_dither(),
    "nonzeros": nonzeros(levels=1, capacity=2000, norm="l2"),
    "min_max_dither, 16 levels": min_max_dither(levels=16),
    "rotated min_max_dither, 16 levels": rotated(min_max_dither(levels=16)),
    "natural": natural(),
    "ternary": ternary(),
    "adaptive_levels, 7 levels": adaptive_levels(levels=7),
    "fixed_threshold": fixed_threshold(BEYOND),
    "signs": signs(),
    "scaled_signs": scaled_signs(),
    "one_bit": one_bit(),
    "top_k": top_k(ratio=RATIO),
    "top_k, blocks of 1000": top_k(k=10, block_size=1000),
    "top_k, sampled": top_k(ratio=RATIO, sample=0.01),
    "random_k": random_k(ratio=RATIO),
    "threshold": threshold(BEYOND, ratio=2 * RATIO),
    "adaptive_threshold": adaptive_threshold(ratio=RATIO),
    "wangni": wangni(ratio=RATIO),
    "sbc": sbc(ratio=RATIO),
    "stc": stc(ratio=RATIO),
    "ada_comp": ada_comp(),
    "variance_based": variance_based(ratio=RATIO),
    "nonzero, blocks of 100": nonzero(density=RATIO, granularity=100),
    "nonzero_union, blocks of 100": nonzero_union(density=RATIO, granularity=100),
    "count_sketch": count_sketch(ratio=RATIO),
    "s2_sketch of all": s2_sketch(density=1, ratio=RATIO, granularity="element"),
    "s2_codes, blocks of 100": s2_codes(density=RATIO, ratio=1.4, granularity=100),
    "error_feedback of top_k": error_feedback(top_k(ratio=RATIO)),
    "error_feedback of scaled_signs": error_feedback(scaled_signs()),
    "momentum_correction of that of top_k": momentum_correction(error_feedback(top_k(ratio=RATIO))),
    "ef21 of top_k": ef21(top_k(ratio=RATIO)),
    "diana of dither, 8 bits": diana(dither(bits=8)),
    "ecq of dither, 8 bits": ecq(blockwise(dither(bits=8), 256)),
}
"""By the name of its factory and what matters of its options; 1 % of the coordinates, mostly."""


def _encoder(codec: jaxcomm.Codec, x: jax.Array) -> Callable[[], object]:
    """`jit(encode)` with its own statistics as they were measured, and a memory from one step."""
    coins = jaxcomm.Coins(*jax.random.split(jax.random.key(0)))

    @jax.jit
    def prepare(x: jax.Array) -> jaxcomm.Context:
        context = jaxcomm.Context(coins, codec.init(x), shape=x.shape)
        return context.replace(agreed=codec.measure(context, x))

    return functools.partial(jax.jit(codec.encode), prepare(x), x)


class Timing(NamedTuple):
    """Median seconds of a codec, and of the two yardsticks in the same moments."""

    encode: float
    copy: float
    top_k: float


def time_codecs(
    size: int, repetitions: int, codecs: Mapping[str, jaxcomm.Codec] = CODECS
) -> dict[str, Timing]:
    """Times each over `size` normal float32 on one device."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal(size, np.float32))
    copy = jax.jit(jnp.copy)
    largest = jax.jit(lambda x: lax.top_k(jnp.abs(x), max(round(RATIO * size), 1)))

    def time(codec: jaxcomm.Codec) -> Timing:
        functions = {
            "encode": _encoder(codec, x),
            "copy": lambda: copy(x),
            "top_k": lambda: largest(x),
        }
        return Timing(**medians(functions, repetitions))

    return {name: time(codec) for name, codec in codecs.items()}


def to_table(timings: Mapping[str, Timing], size: int) -> Table:
    """Nanoseconds a coordinate, and how many times the two yardsticks."""
    table = Table(title=f"jit(encode) of {size:,} float32, one {jax.devices()[0].device_kind}")
    for heading in ("codec", "ns/coordinate", "copies", "of lax.top_k"):
        table.add_column(heading, justify="left" if heading == "codec" else "right")

    def add(name: str, seconds: float, copy: float, top_k: float, end_section: bool) -> None:
        table.add_row(
            name,
            f"{1e9 * seconds / size:.2f}",
            f"{seconds / copy:.1f}",
            f"{seconds / top_k:.2f}",
            end_section=end_section,
        )

    copy, top_k = (
        statistics.median(timing[position] for timing in timings.values()) for position in (1, 2)
    )
    add("a copy", copy, copy, top_k, False)
    add(f"jax.lax.top_k of {100 * RATIO:g} %", top_k, copy, top_k, True)
    for name, timing in timings.items():
        add(name, *timing, False)
    return table
