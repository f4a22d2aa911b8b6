"""Narrow floats, also in blocks that share a power of two: MXFP8, and block-scaled int8 and fp8."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import _noise
from jaxcomm._contract import Claims, Codec, Context, Memory
from jaxcomm._require import checked
from jaxcomm.compression._means import lift_of
from jaxcomm.compression.quantizers._dither import NORMS
from pallas_kernels import block_float as ops
from pallas_kernels._dispatch import nondifferentiable
from pallas_kernels.block_float.reference import FORMATS


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
        lift = lift_of(peak)
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


ROUNDINGS = ("stochastic", "nearest")


class BlockFloatPayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf): a byte per coordinate, and one per block."""

    elements: jax.Array  # dtype[shape]
    exponents: jax.Array  # uint8[ceil(size / block_size)], of scales 2**(exponent - 127)


@checked
def block_float(
    dtype: Literal["float8_e4m3fn", "float8_e5m2", "int8"] = "float8_e4m3fn",
    *,
    block_size: int = 32,
    rounding: Literal["stochastic", "nearest"] = "stochastic",
) -> Codec:
    r"""Rounds each block to 8-bit numbers times a power of two.

    .. math:: Q(x)_j = 2^k \operatorname{round}(2^{-k} x_j), \qquad
              k = \lceil \log_2 (\max_i |x_i| / L) \rceil

    over the block of :math:`x_j`, for the largest number L of the format. No number is clipped.
    With p digits of the mantissa and the distance u of the smallest numbers of the format,

    .. math:: \|Q(x) - x\|^2 \le \omega \|x\|^2, \qquad
              \omega = 4^{-p - 1} + \frac{b u^2}{L^2}

    in expectation for stochastic rounding, and always for rounding to nearest. int8 has the second
    term only. The bound is about 1/256 for `float8_e4m3fn`, 1/64 for `float8_e5m2`, and b / 127^2
    for int8. It does not depend on the size of the array. It does not hold for blocks whose largest
    magnitude is below :math:`2^{-118}`.

    Args:
      dtype: The format of a number. `float8_e4m3fn` in blocks of 32 is MXFP8.
      block_size: b, the number of coordinates that share a scale: 32, 64, 128, 256, 512 or 1024.
      rounding: `"stochastic"`, without bias, or `"nearest"`, which draws nothing.

    Returns:
      A codec that states :math:`\omega` as its `variance` (stochastic), or :math:`1 - \omega` as
      its `contraction` (nearest). Its payload has 1 + 1 / b bytes per coordinate, and it has no
      statistics. `combine` is `None`, because each worker has its own scales: receivers add in
      float32.

    Raises:
      ValueError: If an argument is not one of the above.
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.quantizers import block_float
      >>> codec, x = block_float("int8", rounding="nearest"), jnp.array([1.0, -0.3, 0.0])
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> print(payload.elements, payload.exponents, codec.decode(Context.of(x), payload))
      [ 64 -19   0] [121] [ 1.       -0.296875  0.      ]

    References:
      Rouhani et al., `Microscaling Data Formats for Deep Learning
      <https://arxiv.org/abs/2310.10537>`_, 2023.

    Differs from the paper: scales are rounded up and not down, so that nothing is clipped; rounding
    may be stochastic; a block may have more than 32 numbers.
    """
    omega = FORMATS[dtype].error(block_size)

    def encode(context: Context, x: jax.Array) -> tuple[BlockFloatPayload, Memory]:
        seeds = _noise.seeds(context.keys.private) if rounding == "stochastic" else None
        payload = ops.encode(x.astype(jnp.float32), seeds, dtype=dtype, block_size=block_size)
        return BlockFloatPayload(*payload), context.memory

    def decode(context: Context, payload: BlockFloatPayload) -> jax.Array:
        x = ops.decode(payload.elements, payload.exponents, block_size=block_size)
        return x.reshape(context.shape) / context.count

    return Codec(
        encode=encode,
        decode=decode,
        claims=Claims(variance=lambda size, workers: omega)
        if rounding == "stochastic"
        else Claims(contraction=lambda size, workers: 1 - omega),
        layout="independent",
    )
