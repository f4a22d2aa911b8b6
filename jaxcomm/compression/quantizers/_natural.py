"""Natural compression: unbiased stochastic rounding to powers of two."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _noise
from jaxcomm._contract import Claims, Codec, Context, Memory
from jaxcomm.compression import _bits
from pallas_kernels._dispatch import nondifferentiable

_MANTISSA = 23
_INFINITE = 255  # The exponent of infinity; NaN would overflow it.


class NaturalPayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf): 9 bits per coordinate."""

    exponents: jax.Array  # uint8[size], the biased exponents of float32; 0 for zero
    signs: jax.Array  # uint32[ceil(size / 32)], a bit is set where a coordinate is negative


def natural() -> Codec:
    r"""Unbiased rounding of each coordinate to one of its two neighboring powers of two.

    .. math:: 2^a \le |x_j| \le 2^{a + 1} \;\mapsto\; 2^{a + 1} \text{ with probability }
              \frac{|x_j| - 2^a}{2^a}, \text{ else } 2^a

    .. math:: \mathbb{E}\|Q(x) - x\|^2 = \sum_j (2^{a_j + 1} - |x_j|) (|x_j| - 2^{a_j})
              \le \tfrac{1}{8} \|x\|^2

    The codec adds 23 random bits to the mantissa, which carry into the exponent. Zeros and powers
    of two are exact, and :math:`Q(2^k x) = 2^k Q(x)` with the same coins. Small coordinates are as
    accurate as large ones, and no norm is reduced over workers.

    Returns:
      A codec without statistics that states its `variance`, 1/8. Its payload has 9 bits per
      coordinate: a uint8, and a bit in uint32 words. `combine` is `None`: sums of powers of two are
      not powers of two. Magnitudes above :math:`2^{127}` become it or infinity. Denormals become
      zero.

    Raises:
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.quantizers import natural
      >>> codec, x = natural(), jnp.array([4.0, -0.25, 0.0])
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> print(payload.exponents, codec.decode(Context.of(x), payload))
      [129 125   0] [ 4.   -0.25  0.  ]

    References:
      Horváth et al., `Natural Compression for Distributed Deep Learning
      <https://arxiv.org/abs/1905.10988>`_, 2019.
    """

    def encode(context: Context, x: jax.Array) -> tuple[NaturalPayload, Memory]:
        (x,) = nondifferentiable("natural", x)
        flat = x.ravel()
        words = lax.bitcast_convert_type(jnp.abs(flat), jnp.uint32)
        noise = _noise.bits(context.coins.private, flat.shape) >> (32 - _MANTISSA)
        rounded = jnp.minimum((words + noise) >> _MANTISSA, jnp.uint32(_INFINITE))
        exponents = jnp.where(words >> _MANTISSA > 0, rounded, 0).astype(jnp.uint8)
        return NaturalPayload(exponents, _bits.pack_bits(flat < 0)), context.memory

    def decode(context: Context, payload: NaturalPayload) -> jax.Array:
        words = payload.exponents.astype(jnp.uint32) << _MANTISSA
        magnitudes = lax.bitcast_convert_type(words, jnp.float32) / context.count
        negative = _bits.unpack_bits(payload.signs, math.prod(context.shape))
        return jnp.where(negative, -magnitudes, magnitudes).reshape(context.shape)

    return Codec(
        encode=encode,
        decode=decode,
        claims=Claims(variance=lambda size, workers: 1 / 8),
        layout="shared_statistics",
    )
