"""Unbiased stochastic rounding to powers of two: natural compression, of a norm, of a maximum."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _noise
from jaxcomm._contract import Claims, Codec, Context, Keys, Memory
from jaxcomm.compression import _bits
from jaxcomm.compression._bits import CodesPayload
from jaxcomm.compression.quantizers._dither import NORMS
from pallas_kernels import exponential
from pallas_kernels._dispatch import nondifferentiable
from pallas_kernels.pack import pack, unpack

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
    of two are exact, and :math:`Q(2^k x) = 2^k Q(x)` with the same keys. Small coordinates are as
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
        noise = _noise.bits(context.keys.private, flat.shape) >> (32 - _MANTISSA)
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


def _headroom(workers: int) -> int:
    """The exponent of the largest magnitude, such that the sum over `workers` stays below 2**0."""
    return 1 + (workers - 1).bit_length()


def exponential_dither() -> Codec:
    r"""Unbiased dithering to the largest magnitude times powers of two, in 8 bits per coordinate.

    .. math:: \mathcal{Q}(x)_j = \pm 2^{-e_j} N, \qquad N = 2^{1 + \lceil \log_2 n \rceil} \max |x|,
              \qquad \mathbb{E}\, \mathcal{Q}(x) = x,
              \qquad \mathbb{E}\|\mathcal{Q}(x)\|^2 \le \tfrac{9}{8} \|x\|^2

    Small coordinates keep their relative accuracy, which uniform levels lose. Each addition rounds
    the sum to a power of two again (`combine` is a function). Each rounding increases the second
    moment by a factor of at most 9/8, so payloads are added in a tree.

    Returns:
      A codec. Its payload has one uint8 per coordinate, the sign and the exponent. Its statistic is
      one float32. It states its `variance`, :math:`\omega = 1/8`, of a single rounding.

    Raises:
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.quantizers import exponential_dither
      >>> codec, x = exponential_dither(), jnp.array([1.0, -0.5, 0.0])
      >>> context = Context.of(x)
      >>> context = context.replace(statistics=codec.measure(context, x))
      >>> payload, _ = codec.encode(context, x)
      >>> print(codec.decode(context, payload))
      [ 1.  -0.5  0. ]

    References:
      Xin et al., `Global-QSGD <https://arxiv.org/abs/2305.18627>`_, 2023.
      Horváth et al., `Natural Compression <https://arxiv.org/abs/1905.10988>`_, 2019.

    Differs from the paper's released code: the number of workers need not be a power of two. Values
    below the smallest power become zero; that code raises them to the smallest power.
    """
    norm = NORMS["max"]

    def encode(context: Context, x: jax.Array) -> tuple[CodesPayload, Memory]:
        codes = exponential.encode(
            x.ravel(),
            context.statistics.max_abs,
            _noise.seeds(context.keys.private),
            headroom=_headroom(context.workers),
        )
        return CodesPayload(codes), context.memory

    def decode(context: Context, payload: CodesPayload) -> jax.Array:
        mean = exponential.decode(
            payload.codes,
            context.statistics.max_abs,
            headroom=_headroom(context.workers),
            count=context.count,
        )
        return mean.reshape(context.shape)

    def combine(keys: Keys, first: CodesPayload, second: CodesPayload) -> CodesPayload:
        seeds = _noise.seeds(keys.private)
        return CodesPayload(exponential.add(first.codes, second.codes, seeds))

    return Codec(
        encode=encode,
        decode=decode,
        measure=lambda context, x: norm.measure(*nondifferentiable("exponential_dither", x)),
        reduce_statistics=norm.reduce_statistics,
        combine=combine,
        # For |y| = 2**-e (1 + f), the variance f (1 - f) is at most (1 + f)**2 / 8. A value under
        # the smallest exponent is lost entirely, but is at most 2**-126 / most of the peak. The
        # peak is a power of two and has no error, which compensates for it.
        claims=Claims(variance=lambda size, workers: 1 / 8),
        layout="shared_statistics",
    )


_BITS = 4
_BIAS = 127
_SIGN = 8
_POWERS = 7  # 2**0 to 2**-6; the eighth code is 0


def e3m0() -> Codec:
    r"""Unbiased rounding to the largest magnitude times a power of two, in 4 bits per coordinate.

    .. math:: Q(x)_j \in \{0, \pm N, \pm 2^{-1} N, \ldots, \pm 2^{-6} N\}, \qquad N = \max |x|,
              \qquad \mathbb{E}\, Q(x) = x

    .. math:: \mathbb{E}\|Q(x) - x\|^2 \le \Big(\frac{1}{8} + \frac{n d}{2^{14}}\Big) \|x\|^2

    A coordinate is rounded to one of its two neighbors. Below the smallest power, that is 0 or this
    power, at a variance of at most :math:`2^{-14} N^2`. For large arrays, use
    `blockwise(e3m0(), 256)`, with :math:`N` of each block: the bound is then 1/8 + 1/64.

    Returns:
      A codec that states its `variance`, over `n` workers that share :math:`N`. Its payload has 4
      bits per coordinate, and its statistic is one float32. `combine` is `None`, because sums of
      powers of two are no powers of two: receivers add in float32.

    Raises:
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.quantizers import e3m0
      >>> codec, x = e3m0(), jnp.array([6.0, -1.5, 0.0])
      >>> context = Context.of(x)
      >>> context = context.replace(statistics=codec.measure(context, x))
      >>> payload, _ = codec.encode(context, x)
      >>> print(codec.decode(context, payload))
      [ 6.  -1.5  0. ]

    References:
      Douillard et al., `Streaming DiLoCo with Overlapping Communication
      <https://arxiv.org/abs/2501.18512>`_, 2025, for outer gradients in this format.

    Differs from the paper: powers are relative to the largest magnitude, and rounding is unbiased.
    The paper states neither a scale nor a rounding.
    """
    norm = NORMS["max"]

    def encode(context: Context, x: jax.Array) -> tuple[CodesPayload, Memory]:
        (x,) = nondifferentiable("e3m0", x)
        flat, peak = x.ravel(), context.statistics.max_abs
        # XLA multiplies by the reciprocal, which is 0 for the largest numbers if not scaled before.
        mantissa, exponent = jnp.frexp(jnp.where(peak > 0, peak, 1))
        share = jnp.where(peak > 0, jnp.ldexp(jnp.abs(flat), -exponent) / mantissa, 0)
        words = lax.bitcast_convert_type(jnp.minimum(share, 1), jnp.uint32)
        noise = _noise.bits(context.keys.private, flat.shape)
        # Noise carries from the mantissa into the exponent, as in natural compression.
        carried = (words + (noise >> (32 - _MANTISSA))) >> _MANTISSA
        least = _BIAS - (_POWERS - 1)
        rounded = carried.astype(jnp.int32) - (least - 1)
        # Below the smallest power, its share of that power is the probability of it.
        uniform = (noise >> 8).astype(jnp.float32) * 2.0**-24
        is_small = share < 2.0 ** -(_POWERS - 1)
        code = jnp.where(
            is_small, (uniform < share * 2.0 ** (_POWERS - 1)).astype(jnp.int32), rounded
        )
        signed = code.astype(jnp.uint32) | jnp.where((flat < 0) & (code > 0), _SIGN, 0).astype(
            jnp.uint32
        )
        return CodesPayload(pack(signed, bits=_BITS)), context.memory

    def decode(context: Context, payload: CodesPayload) -> jax.Array:
        signed = unpack(payload.codes, bits=_BITS, shape=(math.prod(context.shape),))
        code = (signed & jnp.uint32(_SIGN - 1)).astype(jnp.float32)
        power = jnp.where(code > 0, jnp.exp2(code - float(_POWERS)), 0) / context.count
        size = power * context.statistics.max_abs
        return jnp.where(signed >= _SIGN, -size, size).reshape(context.shape)

    return Codec(
        encode=encode,
        decode=decode,
        measure=lambda context, x: norm.measure(*nondifferentiable("e3m0", x)),
        reduce_statistics=norm.reduce_statistics,
        claims=Claims(variance=lambda size, workers: 1 / 8 + size * workers / 2**14),
        layout="shared_statistics",
    )
