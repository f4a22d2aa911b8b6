"""The quantizer of LAQ: each coordinate goes to the nearest point of a uniform grid."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._contract import Codec, Context, Memory
from pallas_kernels.pack import pack, unpack


class GridPayload(NamedTuple):
    """The payload of one leaf."""

    codes: jax.Array  # uint32[ceil(size / lanes)]


class Radius(NamedTuple):
    """The statistic of one leaf."""

    radius: Any  # float32[], the largest magnitude


def nearest_on_grid(bits: int) -> Codec:
    r"""A codec that rounds to the nearest of :math:`2^b` points between the largest magnitudes.

    .. math:: q_j = \Big\lfloor \frac{x_j + R}{2 \tau R} + \frac{1}{2} \Big\rfloor, \qquad
              Q(x)_j = 2 \tau R q_j - R, \qquad R = \|x\|_\infty, \quad \tau = \frac{1}{2^b - 1}

    So :math:`\|Q(x) - x\|_\infty \le \tau R`. It is biased, and no contraction: 0 is no point of
    the grid. Each leaf sends `bits` per coordinate, in words of 32 bits, and one float32.
    """
    intervals = 2**bits - 1

    def measure(context: Context, x: jax.Array) -> Radius:
        return Radius(jnp.max(jnp.abs(x), initial=0.0))

    def encode(context: Context, x: jax.Array) -> tuple[GridPayload, Memory]:
        radius = context.statistics.radius
        fraction = jnp.where(radius > 0, x / radius, 0.0)
        codes = jnp.floor((fraction + 1) * (intervals / 2) + 0.5)
        codes = jnp.clip(codes, 0, intervals).astype(jnp.uint32)
        return GridPayload(pack(codes, bits=bits)), context.memory

    def decode(context: Context, payload: GridPayload) -> jax.Array:
        codes = unpack(payload.codes, bits=bits, shape=context.shape)
        return context.statistics.radius * (codes.astype(jnp.float32) * (2 / intervals) - 1)

    return Codec(encode, decode, measure=measure, reduce_statistics=Radius("max"))
