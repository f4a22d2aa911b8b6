"""Blocks of 8-bit numbers that share a power of two."""

import numbers
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._dispatch import Implementation, nondifferentiable
from pallas_kernels.block_float.reference import FORMATS

Element = Literal["int8", "float8_e4m3fn", "float8_e5m2"]

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024)


def _require_block_size(block_size: int) -> None:
    if not isinstance(block_size, numbers.Integral) or block_size not in BLOCK_SIZES:
        raise ValueError(f"`block_size` must be one of {BLOCK_SIZES}, got {block_size!r}.")


def encode(
    x: jax.Array,
    seeds: jax.Array | None,
    *,
    dtype: Element = "float8_e4m3fn",
    block_size: int = 32,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    r"""Rounds each block of coordinates to 8-bit numbers times a power of two.

    .. math:: k = \lceil \log_2 (\max_j |x_j| / L) \rceil, \qquad
              e_j = \operatorname{round}(2^{-k} x_j)

    for the largest finite number L of the format. The scale is rounded up, so no number of a block
    is clipped. With `seeds`, rounding is stochastic and without bias: a random number of 24 digits,
    a hash of the seeds and of j, is added below the last digit. Before that, what has more digits
    is cut to 24 of them (int8), or rounded to 20 or 21 (subnormal numbers of e4m3 and of e5m2).
    This is the only bias. Without seeds, rounding is to nearest, ties to even. Every backend
    returns the same bytes. Subnormal float32 numbers give 0. A block with a NaN or an infinity
    decodes to NaN.

    Memory traffic: the kernels read `x` once and write 1 + 1 / `block_size` bytes per coordinate.
    A kernel reads and writes `x` once more to fill its tiles if the size is not a multiple of
    16,384 (TPU), or under `vmap` of `block_size` (GPU). XLA may read `x` twice.

    Args:
      x: float32 or bfloat16 of any shape, of fewer than 2**32 elements.
      seeds: uint32[2], or None for rounding to nearest.
      dtype: `"float8_e4m3fn"` (with `block_size=32` this is MXFP8), `"float8_e5m2"` or `"int8"`
        (MXINT8 without its factor of 1/64).
      block_size: Coordinates that share a scale, neighbors in the flat array: 32, 64, 128, 256, 512
        or 1024.
      implementation: `"reference"`, `"mosaic_gpu"`, `"mosaic_tpu"`, or None for the fastest one, as
        measured or assumed.

    Returns:
      The elements, `dtype` of the shape of `x`; and :math:`k + 127`, uint8[ceil(size /
      block_size)], 255 for a block that is not finite. This is the format E8M0 of MX. Scales below
      :math:`2^{-126}` are :math:`2^{-126}`.

    Raises:
      ValueError: If an argument is out of range or of a wrong shape or dtype.
      NotImplementedError: If the device cannot run the named implementation.
      TypeError: If it is differentiated: rounding has no gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import block_float
      >>> elements, exponents = block_float.encode(
      ...     jnp.array([1.0, -0.3, 0.0]), None, dtype="int8"
      ... )
      >>> elements.tolist(), exponents.tolist()
      ([64, -19, 0], [121])
      >>> block_float.decode(elements, exponents).tolist()
      [1.0, -0.296875, 0.0]

    References:
      Rouhani et al., `Microscaling Data Formats for Deep Learning
      <https://arxiv.org/abs/2310.10537>`_, 2023. The paper rounds scales down and clips.
    """
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"`x` must be float32 or bfloat16, got {x.dtype}.")
    if dtype not in FORMATS:
        raise ValueError(f"`dtype` must be one of {tuple(FORMATS)}, got {dtype!r}.")
    _require_block_size(block_size)
    if seeds is not None and (seeds.dtype != jnp.uint32 or seeds.shape != (2,)):
        raise ValueError(f"`seeds` must be uint32[2], got {seeds.dtype}{list(seeds.shape)}.")
    (x,) = nondifferentiable("block_float.encode", x)
    elements, exponents = _dispatch.run(
        "block_float",
        "encode",
        implementation,
        x.size,
        x,
        jnp.zeros(2, jnp.uint32) if seeds is None else seeds,
        dtype=dtype,
        block_size=block_size,
        stochastic=seeds is not None,
    )
    return elements, exponents


def decode(elements: jax.Array, exponents: jax.Array, *, block_size: int = 32) -> jax.Array:
    r"""The numbers of :func:`encode`.

    .. math:: x_j = 2^k e_j

    XLA fuses this product into the pass that reads the result, so there is no kernel.

    Args:
      elements: From :func:`encode`.
      exponents: From :func:`encode`.
      block_size: As for :func:`encode`.

    Returns:
      float32 of the shape of `elements`. Some backends return 0 in place of subnormal numbers.

    Raises:
      ValueError: If an argument is out of range or of a wrong shape or dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import block_float
      >>> block_float.decode(jnp.array([3, -1], jnp.int8), jnp.array([128], jnp.uint8)).tolist()
      [6.0, -2.0]
    """
    _require_block_size(block_size)
    if elements.dtype.name not in FORMATS:
        raise ValueError(f"`elements` must be one of {tuple(FORMATS)}, got {elements.dtype}.")
    expected = (-(-elements.size // block_size),)
    if exponents.dtype != jnp.uint8 or exponents.shape != expected:
        raise ValueError(
            f"`exponents` must be uint8{list(expected)} for {elements.size} elements in blocks of "
            f"{block_size}, got {exponents.dtype}{list(exponents.shape)}."
        )
    decoded: jax.Array = _dispatch.run(
        "block_float",
        "decode",
        "reference",
        elements.size,
        elements,
        exponents,
        block_size=block_size,
    )
    return decoded
