"""Two methods that send little and are wrong: what a comparison has to be able to tell apart.

Made from the public contracts alone. Neither is unbiased and neither remembers what it left out.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

import jaxcomm
from jaxcomm.compression.quantizers import DitherPayload, dither


def truncating_dither() -> jaxcomm.Codec:
    r"""8-bit dithering that truncates towards zero where it should round at random.

    .. math:: c_j = \mathrm{trunc}(s x_j / \|x\|)

    with the levels, norm, wire and decoder of `dither(bits=8)`. Coordinates below a level are
    always lost.
    """

    def encode(context: jaxcomm.Context, x: jax.Array) -> tuple[DitherPayload, jaxcomm.Memory]:
        levels, norm = 127 // context.workers, context.statistics.max_abs
        scale = jnp.where(norm > 0, levels / norm, 0)
        codes = jnp.clip(jnp.trunc(x * scale), -levels, levels)
        return DitherPayload(codes.astype(jnp.int8)), context.memory

    return dither(bits=8)._replace(encode=encode)


class LargestCoordinates(NamedTuple):
    """One unit on the wire of :func:`largest`."""

    indices: jax.Array  # int32[kept]
    values: jax.Array  # float32[kept]


def largest(fraction: float) -> jaxcomm.Codec:
    """The coordinates of largest magnitude, without error feedback.

    Args:
      fraction: Of the coordinates that are kept, at least one.
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
    return jaxcomm.all_reduce_mean("data", truncating_dither(), seed=seed)


def top_1_percent(seed: int = 0) -> optax.GradientTransformationExtraArgs:
    """The largest 1 % of each worker's coordinates, gathered."""
    return jaxcomm.all_gather_mean("data", largest(0.01), seed=seed)
