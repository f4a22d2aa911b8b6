"""Exponential dithering: unbiased stochastic rounding to a norm times powers of two."""

from typing import NamedTuple

import jax

from jaxcomm import _noise
from jaxcomm._contract import Claims, Codec, Coins, Context, Memory
from jaxcomm.compression.quantizers._dither import NORMS
from pallas_kernels import exponential
from pallas_kernels._dispatch import nondifferentiable


class ExponentialPayload(NamedTuple):
    """The payload of one unit: the sign in bit 7, and the exponent, 1 to 127, below; 0 is zero."""

    codes: jax.Array  # uint8[size]


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

    def encode(context: Context, x: jax.Array) -> tuple[ExponentialPayload, Memory]:
        codes = exponential.encode(
            x.ravel(),
            context.statistics.max_abs,
            _noise.seeds(context.coins.private),
            headroom=_headroom(context.workers),
        )
        return ExponentialPayload(codes), context.memory

    def decode(context: Context, payload: ExponentialPayload) -> jax.Array:
        mean = exponential.decode(
            payload.codes,
            context.statistics.max_abs,
            headroom=_headroom(context.workers),
            count=context.count,
        )
        return mean.reshape(context.shape)

    def combine(
        coins: Coins, first: ExponentialPayload, second: ExponentialPayload
    ) -> ExponentialPayload:
        seeds = _noise.seeds(coins.private)
        return ExponentialPayload(exponential.add(first.codes, second.codes, seeds))

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
