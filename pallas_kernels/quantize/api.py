"""Stochastic rounding to integer fields with a global scale, and the inverse."""

import functools
import math
from collections.abc import Callable
from typing import Literal, overload

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._dispatch import Implementation, nondifferentiable
from pallas_kernels.pack.reference import words
from pallas_kernels.quantize.reference import DTYPES

WIDTHS = (*range(2, 17), 32)
MOST_LEVELS = 2**24 - 1  # float32 represents all integers up to this number exactly.


def _require_field(scale: jax.Array, levels: int, bits: int, count: int) -> None:
    if scale.dtype != jnp.float32 or scale.shape:
        raise ValueError(f"`scale` must be float32[], got {scale.dtype}{list(scale.shape)}.")
    if bits not in WIDTHS:
        raise ValueError(f"`bits` must be in [2, 16], or 32, got {bits}.")
    if not 1 <= levels <= MOST_LEVELS:
        raise ValueError(f"`levels` must be in [1, {MOST_LEVELS}], got {levels}.")
    if count < 1:
        raise ValueError(f"`count` must be at least 1, got {count}.")
    if 2 * count * levels >= 2**bits:
        raise ValueError(
            f"`bits`={bits} cannot hold the sum of {count} codes of `levels`={levels}: "
            f"2 * {count} * {levels} is not below 2**{bits}."
        )


@overload
def quantize(
    x: jax.Array,
    scale: jax.Array,
    seeds: jax.Array,
    *,
    levels: int,
    bits: int,
    residual: Literal[False] = False,
    added: jax.Array | None = None,
    divisor: float = 1.0,
    implementation: Implementation | None = None,
) -> jax.Array: ...


@overload
def quantize(
    x: jax.Array,
    scale: jax.Array,
    seeds: jax.Array,
    *,
    levels: int,
    bits: int,
    residual: Literal[True],
    added: jax.Array | None = None,
    divisor: float = 1.0,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def quantize(
    x: jax.Array,
    scale: jax.Array,
    seeds: jax.Array,
    *,
    levels: int,
    bits: int,
    residual: bool = False,
    added: jax.Array | None = None,
    divisor: float = 1.0,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    r"""Rounds :math:`s x / \|x\|` to one of the two adjacent integers, without bias.

    .. math:: c_j = \lfloor s x_j / \|x\| + u_j \rfloor, \quad u_j \sim \mathcal{U}[0, 1),
              \quad |c_j| \le s

    The computation is in fixed point. Up to 127 levels, :math:`s x_j / \|x\|` is rounded to the
    nearest multiple of :math:`2^{-f}`, :math:`f = 22 - \lceil \log_2(s + 1) \rceil`: a bias of
    either sign, at most :math:`2^{-16}` of a level for 127 levels, and :math:`2^{-22} \|x\|` for
    any number of them. So coordinates below :math:`2^{-23} \|x\|` always give 0. For more levels,
    it is truncated to :math:`f = 31 - \lceil \log_2(s + 1) \rceil` digits: less than :math:`2^{-f}`
    of a level towards zero. :math:`u_j` is a hash of the seeds and of :math:`j`. Every backend
    returns the same integers. NaN and subnormal numbers give 0; infinities give :math:`\pm s`.

    Args:
      x: float32 or bfloat16 of any shape, of fewer than 2**32 elements.
      scale: float32[], :math:`\|x\|`, at least the largest magnitude in `x`; 0 gives zeros.
      seeds: uint32[2].
      levels: :math:`s`, a Python int.
      bits: Width of a field, 2 to 16 or 32. A word of 32 bits holds as many fields as fit.
      residual: Whether to also return the rounding error of `x`, computed in the same pass.
      added: float32 or bfloat16 of the shape of `x`. It is added to `x`, in float32, in the same
        pass: error feedback with the residual of an earlier step. `scale` is that of the sum.
      divisor: If receivers divide what they decode by this number, so does the residual.
      implementation: `"reference"`, `"mosaic_gpu"`, `"mosaic_tpu"`, or None for the fastest one, as
        measured or assumed.

    Returns:
      The codes: int8 of the shape of `x` for 8 bits, int32 for 32, else uint32[words] of codes plus
      `levels`, in the layout of :func:`pallas_kernels.pack.pack`. You can add the words of several
      workers as long as the sums fit. With `residual`, also :math:`x_j - c_j \|x\| / s` in the
      dtype of `added`, or else of `x`; its last bit may differ between backends.

    Raises:
      ValueError: If an argument is out of range or of a wrong shape or dtype.
      NotImplementedError: If the device cannot run the named implementation.
      TypeError: If it is differentiated: rounding has no gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.quantize import dequantize, quantize
      >>> x, scale = jnp.array([1.0, -0.5, 0.0]), jnp.float32(1)
      >>> codes = quantize(x, scale, jnp.array([1, 2], jnp.uint32), levels=2, bits=8)
      >>> codes.dtype, codes.tolist()
      (dtype('int8'), [2, -1, 0])
      >>> dequantize(codes, scale, levels=2, bits=8, shape=(3,)).tolist()
      [1.0, -0.5, 0.0]

    References:
      Xin et al., `Global-QSGD <https://arxiv.org/abs/2305.18627>`_, 2023.
    """
    floats = (jnp.float32, jnp.bfloat16)
    if x.dtype not in floats:
        raise ValueError(f"`x` must be float32 or bfloat16, got {x.dtype}.")
    if seeds.dtype != jnp.uint32 or seeds.shape != (2,):
        raise ValueError(f"`seeds` must be uint32[2], got {seeds.dtype}{list(seeds.shape)}.")
    _require_field(scale, levels, bits, 1)
    if added is not None and (added.dtype not in floats or added.shape != x.shape):
        raise ValueError(
            f"`added` must be float32 or bfloat16 {list(x.shape)}, got {jax.typeof(added)}."
        )
    if not divisor > 0:
        raise ValueError(f"`divisor` must be positive, got {divisor}.")
    x, scale, *more = nondifferentiable("quantize", x, scale, *([] if added is None else [added]))
    results = _dispatch.run(
        "quantize",
        "quantize",
        implementation,
        x.size,
        x,
        scale,
        seeds,
        *more,
        levels=levels,
        bits=bits,
        residual=residual,
        divisor=float(divisor),
    )
    return results if residual else results[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _linear(run: Callable[..., jax.Array], codes: jax.Array, *floats: jax.Array) -> jax.Array:
    return run(codes, *floats)


@_linear.defjvp
def _linear_jvp(
    run: Callable[..., jax.Array], primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    codes, scale, *_ = primals
    _, scale_tangent, *accumulate_tangent = tangents
    tangent = run(codes, jnp.ones_like(scale)) * scale_tangent
    return run(*primals), sum(accumulate_tangent, start=tangent)


def dequantize(
    codes: jax.Array,
    scale: jax.Array,
    *,
    levels: int,
    bits: int,
    shape: tuple[int, ...],
    count: int = 1,
    accumulate: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""The mean of `count` arrays from the sum of their codes.

    .. math:: \bar x_j = \frac{\|x\|}{n s} \sum_i c_{ij}

    Args:
      codes: The codes from :func:`quantize`, or the sum of `count` of them.
      scale: float32[], the same as for :func:`quantize`.
      levels: :math:`s`.
      bits: Width of a field.
      shape: Shape of the result.
      count: :math:`n`, the number of arrays that were added.
      accumulate: float32 of `shape`. The result is added to it in the same pass.
      implementation: As for :func:`quantize`.

    Returns:
      float32 of `shape`: linear in `scale` and `accumulate`, and differentiable in both.

    Raises:
      ValueError: If an argument is out of range or of a wrong shape or dtype.
      NotImplementedError: If the device cannot run the named implementation.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels.quantize import dequantize, quantize
      >>> scale, seeds = jnp.float32(1), jnp.array([1, 2], jnp.uint32)
      >>> codes = [
      ...     quantize(x, scale, seeds, levels=1, bits=4)
      ...     for x in (jnp.array([1.0, 0.0]), jnp.array([1.0, -1.0]))
      ... ]
      >>> dequantize(codes[0] + codes[1], scale, levels=1, bits=4, shape=(2,), count=2).tolist()
      [1.0, -0.5]
    """
    _require_field(scale, levels, bits, count)
    shape, size = tuple(shape), math.prod(shape)
    dtype = jnp.dtype(DTYPES.get(bits, jnp.uint32))
    expected = shape if bits in DTYPES else (words(size, bits),)
    if codes.dtype != dtype or codes.shape != expected:
        raise ValueError(
            f"`codes` must be {dtype.name}{list(expected)} for `bits`={bits} and `shape`={shape}, "
            f"got {codes.dtype}{list(codes.shape)}."
        )
    if accumulate is not None and (accumulate.dtype != jnp.float32 or accumulate.shape != shape):
        raise ValueError(
            f"`accumulate` must be float32{list(shape)}, "
            f"got {accumulate.dtype}{list(accumulate.shape)}."
        )
    run = functools.partial(
        _dispatch.run,
        "quantize",
        "dequantize",
        implementation,
        size,
        levels=levels,
        bits=bits,
        count=count,
        shape=shape,
    )
    return _linear(run, codes, scale, *([] if accumulate is None else [accumulate]))
