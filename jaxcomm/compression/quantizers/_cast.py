"""Rounding to narrow floats."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._contract import Claims, Codec, Context, Memory
from jaxcomm.compression.quantizers._dither import NORMS
from pallas_kernels._dispatch import nondifferentiable


class CastPayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf)."""

    words: jax.Array  # dtype[shape]


def _half_ulp(dtype: Any) -> float:
    """The largest relative error of rounding a normal number to nearest."""
    return float(2.0 ** -(jnp.finfo(dtype).nmant + 1))


def cast(dtype: Any) -> Codec:
    r"""Rounds to the nearest value of a narrower float with the same range, such as bfloat16.

    .. math:: |Q(x)_j - x_j| \le 2^{-p} |x_j|, \qquad p = \text{bits of the mantissa} + 1

    Args:
      dtype: The float type to send. Its largest value should be close to that of float32.

    Returns:
      A codec without statistics. Its payload has one `dtype` per coordinate. `combine` is `None`:
      sums in the narrow float would round at each addition. If `dtype` has the exponent range of
      float32, the codec states its `contraction`, :math:`\delta = 1 - 2^{-2p}`, which holds for
      magnitudes that do not round to infinity.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.quantizers import cast
      >>> codec, x = cast(jnp.bfloat16), jnp.array([1.0, 1.001])
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> print(codec.decode(Context.of(x), payload))
      [1. 1.]
    """
    info = jnp.finfo(dtype)
    of_float32 = jnp.finfo(jnp.float32)
    full_range = (info.minexp, info.maxexp) == (of_float32.minexp, of_float32.maxexp)

    def decode(context: Context, payload: CastPayload) -> jax.Array:
        return payload.words.astype(jnp.float32).reshape(context.shape) / context.count

    def contraction(size: int, workers: int) -> float:
        return 1 - _half_ulp(dtype) ** 2

    return Codec(
        encode=lambda context, x: (CastPayload(x.astype(dtype)), context.memory),
        decode=decode,
        claims=Claims(contraction=contraction if full_range else None),
        layout="shared_statistics",
    )


def scaled_cast(dtype: Any) -> Codec:
    r"""Rounds to a float of small range, after scaling the largest magnitude to its largest value.

    .. math:: Q(x) = \frac{\max |x|}{m}\, \mathrm{round}\Big(\frac{m\, x}{\max |x|}\Big), \qquad
              m \text{ the largest finite value}

    Args:
      dtype: A float such as float8_e4m3fn.

    Returns:
      A codec with one float32 statistic. Its payload has one `dtype` per coordinate. It states its
      `contraction`, :math:`\delta = 1 - 2^{-2p} (1 + n d\, t^2 / m^2)` with :math:`t` the smallest
      normal number: below it, each of the :math:`n d` numbers has an error of up to :math:`2^{-p}
      t`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.quantizers import scaled_cast
      >>> codec, x = scaled_cast(jnp.float8_e4m3fn), jnp.array([1e6, -5e5])
      >>> context = Context.of(x)
      >>> context = context.replace(statistics=codec.measure(context, x))
      >>> payload, _ = codec.encode(context, x)
      >>> print(codec.decode(context, payload))
      [ 1.e+06 -5.e+05]
    """
    norm, largest = NORMS["max"], float(jnp.finfo(dtype).max)
    smallest = float(jnp.finfo(dtype).smallest_normal)

    def encode(context: Context, x: jax.Array) -> tuple[CastPayload, Memory]:
        (x,) = nondifferentiable("scaled_cast", x)
        peak = context.statistics.max_abs
        lift = jnp.where(peak < 1, jnp.float32(2.0**64), jnp.float32(2.0**-64))
        scale = jnp.where(peak > 0, largest / (peak * lift), 0)
        words = jnp.clip(x * lift * scale, -largest, largest).astype(dtype)
        return CastPayload(words), context.memory

    def decode(context: Context, payload: CastPayload) -> jax.Array:
        words = payload.words.astype(jnp.float32).reshape(context.shape)
        return words / (largest * context.count) * context.statistics.max_abs

    def contraction(size: int, workers: int) -> float:
        underflow = workers * size * (smallest / largest) ** 2
        return 1 - _half_ulp(dtype) ** 2 * (1 + underflow)

    return Codec(
        encode=encode,
        decode=decode,
        measure=lambda context, x: norm.measure(*nondifferentiable("scaled_cast", x)),
        reduce_statistics=norm.reduce_statistics,
        claims=Claims(contraction=contraction),
        layout="shared_statistics",
    )
