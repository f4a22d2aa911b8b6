"""Times 8-bit dithering and the simplest code that does the same or less."""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

import jaxcomm
from experiments.study.table import to_rich
from experiments.training.timing import medians
from jaxcomm import _noise
from jaxcomm.compression.quantizers import dither

MAX_RATIO = 2.0


def _uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Numbers in [0, 1) from the counter hash of the codec."""
    return (_noise.bits(key, shape) >> 8).astype(jnp.float32) * 2.0**-24


def time_passes(size: int, repetitions: int) -> dict[str, float]:
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
    floor_precomputed = jax.jit(
        lambda noise, x, scale: jnp.floor(x * scale + noise).astype(jnp.int8)
    )
    multiply = jax.jit(lambda codes, scale: codes.astype(jnp.float32) * scale)

    norm = measure(x)
    with_statistics = context.replace(statistics=norm)
    payload = encode(with_statistics, x)
    scale = levels / norm.max_abs
    noise = jax.jit(_uniform, static_argnums=1)(key, x.shape)
    return medians(
        {
            "measure": lambda: measure(x),
            "encode": lambda: encode(with_statistics, x),
            "encode, floor with hashed noise": lambda: floor_hashed(key, x, scale),
            "encode, floor with precomputed noise": lambda: floor_precomputed(noise, x, scale),
            "decode": lambda: decode(with_statistics, payload),
            "decode, multiply": lambda: multiply(payload.codes, 1 / scale),
        },
        repetitions,
    )


def to_table(seconds: Mapping[str, float], size: int) -> Table:
    """Nanoseconds per coordinate, and multiples of the plain code."""
    title = f"8-bit dithering of {size:,} float32, one {jax.devices()[0].device_kind}"
    lines = []
    for name, median in seconds.items():
        base, comma, _ = name.partition(",")
        ratio = f"{seconds[base] / median:.2f}" if comma else ""
        lines.append((name, f"{1e9 * median / size:.3f}", ratio))
    return to_rich(("pass", "ns/coordinate", "codec / this"), lines, title=title)


def verdicts(seconds: Mapping[str, float]) -> Iterator[str]:
    """Whether each pass is within its limit."""
    for name, plain in (
        ("encode", "encode, floor with hashed noise"),
        ("decode", "decode, multiply"),
    ):
        ratio = seconds[name] / seconds[plain]
        verdict = "within" if ratio <= MAX_RATIO else "ABOVE"
        yield f"{name}: {ratio:.2f} times the plain code, {verdict} {MAX_RATIO:g}"
