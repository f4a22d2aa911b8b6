"""Stochastic rounding to powers of two, one byte each: a sign and an exponent."""

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._dispatch import Implementation, nondifferentiable

MOST_HEADROOM = 62  # The factor of the largest scale is a normal number.


def _require_scale(scale: jax.Array, headroom: int) -> None:
    if scale.dtype != jnp.float32 or scale.shape:
        raise ValueError(f"`scale` must be float32[], got {scale.dtype}{list(scale.shape)}.")
    if not 1 <= headroom <= MOST_HEADROOM:
        raise ValueError(f"`headroom` must be in [1, {MOST_HEADROOM}], got {headroom}.")


def _require_seeds(seeds: jax.Array) -> None:
    if seeds.dtype != jnp.uint32 or seeds.shape != (2,):
        raise ValueError(f"`seeds` must be uint32[2], got {seeds.dtype}{list(seeds.shape)}.")


def _require_codes(name: str, codes: jax.Array) -> None:
    if codes.dtype != jnp.uint8:
        raise ValueError(f"`{name}` must be uint8, got {codes.dtype}.")


def encode(
    x: jax.Array,
    scale: jax.Array,
    seeds: jax.Array,
    *,
    headroom: int,
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""Rounds :math:`2^{-h} x / \|x\|` to one of the two adjacent powers of two, without bias.

    .. math:: 2^{-h} |x_j| / \|x\| = 2^{-e} (1 + f) \;\mapsto\;
              2^{-e + 1} \text{ with probability } f, \text{ else } 2^{-e}

    A random number, a hash of the seeds and of :math:`j`, is added to the mantissa and carries into
    the exponent. Every backend returns the same integers. NaN and subnormal numbers give 0. Numbers
    also give 0 if they are so small relative to the scale that an intermediate result is subnormal
    (:math:`2^{-122}` at most). Infinities give the largest code.

    Memory traffic: the op reads `x` once and writes the codes once. A kernel reads and writes `x`
    once more to fill blocks if its size is not a multiple of 128 (TPU) or 1024 (GPU).

    Args:
      x: float32 or bfloat16 of any shape, of fewer than 2**32 elements.
      scale: float32[], :math:`\|x\|`, at least the largest magnitude in `x`; 0 gives zeros.
      seeds: uint32[2].
      headroom: :math:`h`, 1 to 62. Codes can be added in a tree of up to :math:`h - 1` levels. The
        sum over n workers needs :math:`h = 1 + \lceil \log_2 n \rceil`.
      implementation: `"reference"`, `"mosaic_gpu"`, `"mosaic_tpu"`, or None for the fastest one, as
        measured or assumed.

    Returns:
      uint8 of the shape of `x`: the sign in bit 7, the exponent :math:`e` below it; 0 for zero.

    Raises:
      ValueError: If an argument is out of range or of a wrong shape or dtype.
      NotImplementedError: If the device cannot run the named implementation.
      TypeError: If it is differentiated: rounding has no gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import exponential
      >>> x, seeds = jnp.array([1.0, -0.25, 0.0]), jnp.array([1, 2], jnp.uint32)
      >>> codes = exponential.encode(x, jnp.float32(1), seeds, headroom=2)
      >>> [hex(code) for code in codes]
      ['0x2', '0x84', '0x0']
      >>> exponential.decode(codes, jnp.float32(1), headroom=2).tolist()
      [1.0, -0.25, 0.0]
      >>> sums = exponential.add(codes, codes, seeds)
      >>> exponential.decode(sums, jnp.float32(1), headroom=2).tolist()
      [2.0, -0.5, 0.0]

    References:
      Horvath et al., `Natural Compression <https://arxiv.org/abs/1905.10988>`_, 2019.
      Xin et al., `Global-QSGD <https://arxiv.org/abs/2305.18627>`_, 2023.
    """
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"`x` must be float32 or bfloat16, got {x.dtype}.")
    _require_scale(scale, headroom)
    _require_seeds(seeds)
    return _dispatch.run(
        "exponential",
        "encode",
        implementation,
        x.size,
        *nondifferentiable("exponential.encode", x, scale),
        seeds,
        headroom=headroom,
    )


def decode(
    codes: jax.Array,
    scale: jax.Array,
    *,
    headroom: int,
    count: int = 1,
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""The mean of `count` arrays from the codes of their sum.

    .. math:: \bar x_j = \pm 2^{h - e_j} \|x\| / n

    Memory traffic: the op reads the codes once and writes the result once. The exceptions of
    :func:`encode` for other sizes apply.

    Args:
      codes: uint8 of any shape, from :func:`encode` or :func:`add`.
      scale: float32[], the same as for :func:`encode`.
      headroom: :math:`h`, the same as for :func:`encode`.
      count: :math:`n`, the number of arrays that were added.
      implementation: As for :func:`encode`.

    Returns:
      float32 of the shape of `codes`. Some backends return 0 in place of subnormal numbers.

    Raises:
      ValueError: If an argument is out of range or of a wrong shape or dtype.
      NotImplementedError: If the device cannot run the named implementation.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import exponential
      >>> codes = jnp.array([0x02, 0x84, 0x00], jnp.uint8)
      >>> exponential.decode(codes, jnp.float32(3), headroom=2, count=2).tolist()
      [1.5, -0.375, 0.0]
    """
    _require_codes("codes", codes)
    _require_scale(scale, headroom)
    if count < 1:
        raise ValueError(f"`count` must be at least 1, got {count}.")
    return _dispatch.run(
        "exponential",
        "decode",
        implementation,
        codes.size,
        codes,
        scale,
        headroom=headroom,
        count=count,
    )


def add(
    a: jax.Array, b: jax.Array, seeds: jax.Array, *, implementation: Implementation | None = None
) -> jax.Array:
    r"""The sums of pairs of powers of two, rounded without bias to powers of two.

    For exponents :math:`e \le e'` the result has the sign of the larger magnitude. For equal signs
    its exponent is :math:`e - 1` with probability :math:`2^{-(e' - e)}`, else :math:`e`. For
    opposite signs the result is zero if :math:`e = e'`; otherwise its exponent is :math:`e + 1`
    with probability :math:`2^{-(e' - e - 1)}`, else :math:`e`. Adding zero leaves the other operand
    unchanged. The second moment grows by at most 9/8. The sum is a float32, which is rounded as in
    :func:`encode`: a probability under :math:`2^{-23}` counts as 0. This is the only bias, less
    than :math:`2^{-23}` of the larger magnitude.

    Memory traffic: the op reads both operands once and writes the sums once. The exceptions of
    :func:`encode` for other sizes apply.

    Args:
      a: uint8 codes of any shape, of fewer than 2**32 elements.
      b: uint8 codes of the same shape.
      seeds: uint32[2], new ones for each sum.
      implementation: As for :func:`encode`.

    Returns:
      uint8 codes of the same shape. A sum of :math:`2^0` has no code and becomes :math:`2^{-1}`; a
      sufficient `headroom` in :func:`encode` prevents this case.

    Raises:
      ValueError: If an argument is of a wrong shape or dtype.
      NotImplementedError: If the device cannot run the named implementation.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import exponential
      >>> a, b = jnp.array([3, 3, 3], jnp.uint8), jnp.array([3, 0x83, 0], jnp.uint8)
      >>> exponential.add(a, b, jnp.array([1, 2], jnp.uint32)).tolist()
      [2, 0, 3]

    References:
      Horvath et al., `Natural Compression <https://arxiv.org/abs/1905.10988>`_, 2019.
      Xin et al., `Global-QSGD <https://arxiv.org/abs/2305.18627>`_, 2023.
    """
    _require_codes("a", a)
    _require_codes("b", b)
    if a.shape != b.shape:
        raise ValueError(f"`a` and `b` must have the same shape, got {a.shape} and {b.shape}.")
    _require_seeds(seeds)
    return _dispatch.run("exponential", "add", implementation, a.size, a, b, seeds)
