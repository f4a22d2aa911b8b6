"""Exponential dithering: unbiased stochastic rounding to powers of two of a norm."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _noise
from jaxcomm._base import Codec, Coins, Memory, no_memory, settled
from jaxcomm.compression.quantizers._norms import NORMS, MaxAbs

_SIGN = 0x80
_EXPONENT = 0x7F


class ExponentialPayload(NamedTuple):
    """One unit on the wire: a sign in bit 7, an exponent 1 to 127 below, 0 for zero."""

    codes: jax.Array  # uint8[size]


def _headroom(workers: int) -> int:
    """The exponent of the largest magnitude, from which `workers` additions never reach 2**0."""
    return 1 + (workers - 1).bit_length()


def round_to_powers(y: jax.Array, key: jax.Array) -> jax.Array:
    r"""Rounds to one of the two powers of two beside, without bias.

    .. math:: |y| = 2^{-e} (1 + f) \;\mapsto\; 2^{-e + 1} \text{ with probability } f,
              \text{ else } 2^{-e}

    By a random number added to the mantissa, which carries into the exponent: exactly unbiased, and
    the same integers on every backend.

    Args:
      y: float32, magnitudes at most 1/2.
      key: key[], this worker's own.

    Returns:
      uint8 codes of the shape of `y`; denormals are zero.
    """
    words = lax.bitcast_convert_type(jnp.abs(y), jnp.uint32)
    rounded = (words + (_noise.bits(key, y.shape) >> 9)) >> 23
    codes = jnp.where(words >> 23 > 0, jnp.uint32(127) - rounded, 0)
    signs = jnp.where((y < 0) & (codes > 0), jnp.uint32(_SIGN), 0)
    return (signs | codes).astype(jnp.uint8)


def add_codes(a: jax.Array, b: jax.Array, key: jax.Array) -> jax.Array:
    r"""The sum of two powers of two, rounded without bias to a power of two.

    With exponents :math:`e \le e'` and the sign of the larger magnitude: of one sign, :math:`e - 1`
    with probability :math:`2^{-(e' - e)}`, else :math:`e`; of opposite signs, zero where
    :math:`e = e'`, else :math:`e + 1` with probability :math:`2^{-(e' - e - 1)}`, else :math:`e`.
    Zero leaves the other as it is. The second moment grows by at most 9/8. Only integers are
    compared; a probability under :math:`2^{-32}` counts as 0.

    Args:
      a: uint8 codes.
      b: uint8 codes of the same shape.
      key: key[], of whoever adds.
    """
    a, b = a.astype(jnp.uint32), b.astype(jnp.uint32)
    exponent = lambda code: (code & _EXPONENT).astype(jnp.int32)  # noqa: E731
    a_is_larger = exponent(a) <= exponent(b)
    larger, smaller = jnp.where(a_is_larger, a, b), jnp.where(a_is_larger, b, a)
    gap = exponent(smaller) - exponent(larger)
    # The leading zeros of random bits are at least m with probability 2**-m.
    zeros = lax.clz(_noise.bits(key, a.shape)).astype(jnp.int32)
    same_sign = (a ^ b) & _SIGN == 0
    up = jnp.where(zeros >= gap, exponent(larger) - 1, exponent(larger))
    down = jnp.where(zeros >= gap - 1, exponent(larger) + 1, exponent(larger))
    moved = jnp.where(same_sign, up, jnp.where(gap == 0, 0, down)).astype(jnp.uint32)
    both = jnp.where(moved > 0, larger & _SIGN | moved, 0)
    return jnp.where(a == 0, b, jnp.where(b == 0, a, both)).astype(jnp.uint8)


def exponential_dither() -> Codec:
    r"""Dithering to powers of two of the largest magnitude, unbiased, 8 bits a coordinate.

    .. math:: \mathcal{Q}(x)_j = \pm 2^{-e_j} N, \qquad N = 2^{1 + \lceil \log_2 n \rceil} \max |x|,
              \qquad \mathbb{E}\, \mathcal{Q}(x) = x,
              \qquad \mathbb{E}\|\mathcal{Q}(x)\|^2 \le \tfrac{9}{8} \|x\|^2

    Small coordinates keep their relative accuracy, where uniform levels lose it. Sums are
    re-rounded to powers of two at each addition (`combine` is a function), each time by a factor
    of at most 9/8 in the second moment, so that they are added in a tree.

    Returns:
      A codec. Its payload is one uint8 a coordinate: sign and exponent; its statistic one float32.
      It states its `variance`, :math:`\omega = 1/8`, of a single rounding.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import Coins
      >>> from jaxcomm.compression.quantizers import exponential_dither
      >>> codec, coins = exponential_dither(), Coins(jax.random.key(0), jax.random.key(1))
      >>> x = jnp.array([1.0, -0.5, 0.0])
      >>> norm = codec.measure(coins, (), x)
      >>> payload, _ = codec.encode(coins, codec.init(x), x, norm, 1)
      >>> print(codec.decode(coins.public, payload, norm, 1, 1, x.shape))
      [ 1.  -0.5  0. ]

    References:
      Xin et al., `Global-QSGD <https://arxiv.org/abs/2305.18627>`_, 2023.
      Horvath et al., `Natural Compression <https://arxiv.org/abs/1905.10988>`_, 2019.

    Differs from the paper's released code: any number of workers, not only powers of two; values
    under the smallest exponent become zero, where the code raises them to it.
    """
    norm = NORMS["max"]

    def encode(
        coins: Coins, memory: Memory, x: jax.Array, agreed: MaxAbs, workers: int
    ) -> tuple[ExponentialPayload, Memory]:
        peak = agreed.max_abs
        lift = jnp.where(peak < 1, jnp.float32(2.0**64), jnp.float32(2.0**-64))
        most = jnp.float32(2.0 ** -_headroom(workers))
        scale = jnp.where(peak > 0, most / (peak * lift), 0)
        y = lax.clamp(-most, (x * lift).ravel() * scale, most)
        return ExponentialPayload(round_to_powers(y, coins.private)), memory

    def decode(
        public: jax.Array,
        payload: ExponentialPayload,
        agreed: MaxAbs,
        workers: int,
        count: int,
        shape: tuple[int, ...],
    ) -> jax.Array:
        del public
        codes = payload.codes.astype(jnp.uint32)
        exponent = codes & _EXPONENT
        power = (jnp.uint32(127 + _headroom(workers)) - exponent) << 23
        magnitude = jnp.where(exponent > 0, lax.bitcast_convert_type(power, jnp.float32), 0)
        signed = jnp.where(codes & _SIGN > 0, -magnitude, magnitude) / count
        return (signed * agreed.max_abs).reshape(shape)

    def combine(
        coins: Coins, first: ExponentialPayload, second: ExponentialPayload
    ) -> ExponentialPayload:
        return ExponentialPayload(add_codes(first.codes, second.codes, coins.private))

    return Codec(
        init=no_memory,
        measure=lambda coins, memory, x: norm.measure(x),
        agree=norm.agree,
        encode=encode,
        decode=decode,
        settle=settled,
        combine=combine,
        # Of |y| = 2**-e (1 + f), the variance f (1 - f) is at most (1 + f)**2 / 8. What is under
        # the smallest exponent loses all of itself, but is at most 2**-126 / most of the peak; and
        # the peak, a power of two, loses nothing, which leaves room for it.
        variance=lambda size, workers: 1 / 8,
    )
