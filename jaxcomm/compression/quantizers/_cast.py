"""Narrow floats on the wire."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._base import Codec, Coins, Memory, no_memory, settled
from jaxcomm.compression.quantizers._norms import NORMS


class CastPayload(NamedTuple):
    """One unit on the wire."""

    words: jax.Array  # dtype[shape]


def _half_ulp(dtype: Any) -> float:
    """The most that rounding to nearest changes a normal number, as a part of it."""
    return float(2.0 ** -(jnp.finfo(dtype).nmant + 1))


def cast(dtype: Any) -> Codec:
    r"""Rounds to a narrower float of the same range, such as bfloat16, to nearest.

    .. math:: |Q(x)_j - x_j| \le 2^{-p} |x_j|, \qquad p \text{ bits of mantissa and the hidden one}

    Args:
      dtype: The float that travels; its largest value should be that of float32, or nearly.

    Returns:
      A codec without statistics. Its payload is one `dtype` a coordinate. `combine` is `None`: sums
      in the narrow float would round at each addition. Where `dtype` has the exponents of float32,
      it states its `contraction`, :math:`\delta = 1 - 2^{-2p}`, of magnitudes that do not round to
      infinity.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import Coins
      >>> from jaxcomm.compression.quantizers import cast
      >>> codec, coins = cast(jnp.bfloat16), Coins(jax.random.key(0), jax.random.key(1))
      >>> x = jnp.array([1.0, 1.001])
      >>> payload, _ = codec.encode(coins, codec.init(x), x, (), 1)
      >>> print(codec.decode(coins.public, payload, (), 1, 1, x.shape))
      [1. 1.]
    """
    info = jnp.finfo(dtype)
    of_float32 = jnp.finfo(jnp.float32)
    full_range = (info.minexp, info.maxexp) == (of_float32.minexp, of_float32.maxexp)

    def decode(
        public: jax.Array,
        payload: CastPayload,
        agreed: tuple[()],
        workers: int,
        count: int,
        shape: tuple[int, ...],
    ) -> jax.Array:
        del public, agreed, workers
        return payload.words.astype(jnp.float32).reshape(shape) / count

    return Codec(
        init=no_memory,
        measure=lambda coins, memory, x: (),
        agree=(),
        encode=lambda coins, memory, x, agreed, workers: (CastPayload(x.astype(dtype)), memory),
        decode=decode,
        settle=settled,
        combine=None,
        contraction=(lambda size, workers: 1 - _half_ulp(dtype) ** 2) if full_range else None,
    )


def scaled_cast(dtype: Any) -> Codec:
    r"""Rounds to a float of small range, scaled such that the largest magnitude is its largest.

    .. math:: Q(x) = \frac{\max |x|}{m}\, \mathrm{round}\Big(\frac{m\, x}{\max |x|}\Big), \qquad
              m \text{ the largest finite value}

    Args:
      dtype: A float such as float8_e4m3fn.

    Returns:
      A codec with one statistic, float32. Its payload is one `dtype` a coordinate. It states its
      `contraction`, :math:`\delta = 1 - 2^{-2p} (1 + n d\, t^2 / m^2)` with :math:`t` the smallest
      normal number: below it, each of :math:`n d` numbers errs by up to :math:`2^{-p} t`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import Coins
      >>> from jaxcomm.compression.quantizers import scaled_cast
      >>> codec = scaled_cast(jnp.float8_e4m3fn)
      >>> coins = Coins(jax.random.key(0), jax.random.key(1))
      >>> x = jnp.array([1e6, -5e5])
      >>> own = codec.measure(coins, codec.init(x), x)
      >>> payload, _ = codec.encode(coins, codec.init(x), x, own, 1)
      >>> print(codec.decode(coins.public, payload, own, 1, 1, x.shape))
      [ 1.e+06 -5.e+05]
    """
    norm, largest = NORMS["max"], float(jnp.finfo(dtype).max)
    smallest = float(jnp.finfo(dtype).smallest_normal)

    def encode(
        coins: Coins, memory: Memory, x: jax.Array, agreed: Any, workers: int
    ) -> tuple[CastPayload, Memory]:
        del coins, workers
        peak = agreed.max_abs
        lift = jnp.where(peak < 1, jnp.float32(2.0**64), jnp.float32(2.0**-64))
        scale = jnp.where(peak > 0, largest / (peak * lift), 0)
        return CastPayload(jnp.clip(x * lift * scale, -largest, largest).astype(dtype)), memory

    def decode(
        public: jax.Array,
        payload: CastPayload,
        agreed: Any,
        workers: int,
        count: int,
        shape: tuple[int, ...],
    ) -> jax.Array:
        del public, workers
        scaled = payload.words.astype(jnp.float32).reshape(shape) / (largest * count)
        return scaled * agreed.max_abs

    def contraction(size: int, workers: int) -> float:
        below = workers * size * (smallest / largest) ** 2
        return 1 - _half_ulp(dtype) ** 2 * (1 + below)

    return Codec(
        init=no_memory,
        measure=lambda coins, memory, x: norm.measure(x),
        agree=norm.agree,
        encode=encode,
        decode=decode,
        settle=settled,
        combine=None,
        contraction=contraction,
    )
