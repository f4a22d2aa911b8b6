"""Two controls: incorrect methods that send few bytes, which a comparison must reject.

Both use the public API only. Neither is unbiased, and neither has error feedback.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

import jaxcomm
from jaxcomm.compression._bits import CodesPayload
from jaxcomm.compression.quantizers import dither


def truncating_dither() -> jaxcomm.Codec:
    r"""8-bit dithering that truncates toward zero instead of rounding at random.

    .. math:: c_j = \mathrm{trunc}(s x_j / \|x\|)

    with the levels, norm, payload and decoder of `dither(bits=8)`. Coordinates below the first
    level are always lost.
    """

    def encode(context: jaxcomm.Context, x: jax.Array) -> tuple[CodesPayload, jaxcomm.Memory]:
        levels, norm = 127 // context.workers, context.statistics.max_abs
        scale = jnp.where(norm > 0, levels / norm, 0)
        codes = jnp.clip(jnp.trunc(x * scale), -levels, levels)
        return CodesPayload(codes.astype(jnp.int8)), context.memory

    return dither(bits=8).replace(encode=encode)


class LargestCoordinates(NamedTuple):
    """The payload of :func:`largest` for one unit."""

    indices: jax.Array  # int32[kept]
    values: jax.Array  # float32[kept]


def largest(fraction: float) -> jaxcomm.Codec:
    """The coordinates of largest magnitude, without error feedback.

    Args:
      fraction: The fraction of the coordinates to send; at least one coordinate is sent.
    """

    def encode(context: jaxcomm.Context, x: jax.Array) -> tuple[LargestCoordinates, jaxcomm.Memory]:
        flat = x.ravel()
        _, indices = lax.top_k(jnp.abs(flat), max(1, round(fraction * flat.size)))
        indices = indices.astype(jnp.int32)
        return LargestCoordinates(indices, flat[indices]), context.memory

    def decode(context: jaxcomm.Context, payload: LargestCoordinates) -> jax.Array:
        zeros = jnp.zeros(context.shape, jnp.float32)
        return zeros.ravel().at[payload.indices].set(payload.values).reshape(context.shape)

    return jaxcomm.Codec(encode=encode, decode=decode)


def truncating(seed: int = 0) -> optax.GradientTransformationExtraArgs:
    """:func:`truncating_dither`, summed over workers as Global-QSGD is."""
    return jaxcomm.all_reduce_mean(truncating_dither(), seed=seed)


def top_1_percent(seed: int = 0) -> optax.GradientTransformationExtraArgs:
    """The largest 1 % of each worker's coordinates, in an all-gather."""
    return jaxcomm.all_gather_mean(largest(0.01), seed=seed)
