"""Blocks of 8-bit numbers that share a power of two: MXFP8, and block-scaled int8 and fp8."""

import numbers
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm import _noise
from jaxcomm._contract import Claims, Codec, Context, Memory
from pallas_kernels import block_float as ops
from pallas_kernels.block_float.api import BLOCK_SIZES
from pallas_kernels.block_float.reference import FORMATS

ROUNDINGS = ("stochastic", "nearest")


class BlockFloatPayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf): a byte per coordinate, and one per block."""

    elements: jax.Array  # dtype[shape]
    exponents: jax.Array  # uint8[ceil(size / block_size)], of scales 2**(exponent - 127)


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
    if dtype not in FORMATS:
        raise ValueError(f"`dtype` must be one of {tuple(FORMATS)}, got {dtype!r}.")
    if not (isinstance(block_size, numbers.Integral) and block_size in BLOCK_SIZES):
        raise ValueError(f"`block_size` must be one of {BLOCK_SIZES}, got {block_size!r}.")
    if rounding not in ROUNDINGS:
        raise ValueError(f"`rounding` must be one of {ROUNDINGS}, got {rounding!r}.")
    omega = FORMATS[dtype].error(block_size)

    def encode(context: Context, x: jax.Array) -> tuple[BlockFloatPayload, Memory]:
        seeds = _noise.seeds(context.coins.private) if rounding == "stochastic" else None
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
