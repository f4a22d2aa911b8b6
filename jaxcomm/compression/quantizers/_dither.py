"""Standard dithering: unbiased stochastic rounding to uniform fractions of a norm."""

import math
import warnings
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _noise
from jaxcomm._contract import Claims, Codec, Context, Diagnostics, Fast, Memory
from jaxcomm.compression._integers import Alphabet, Integers, rounded_normal
from jaxcomm.compression.quantizers import _fields, _norms
from pallas_kernels._checks import nondifferentiable
from pallas_kernels.quantize import dequantize, quantize

DEFAULT_LEVELS = 15
FEW_LEVELS = 4


class DitherPayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf), or a sum of such payloads over workers."""

    codes: jax.Array  # int8[shape], int32[shape] or uint32[ceil(size / lanes)]


def variance_constant(size: int, levels: int, workers: int) -> float:
    r"""The bound :math:`\theta` on the variance of :func:`dither`.

    .. math:: \mathbb{E}\|G - \bar x\|^2 \le \frac{\theta}{n} \sum_i \|x_i\|^2,
              \qquad \theta = \min\left(\frac{d}{s^2}, \frac{\sqrt{d / n}}{s}\right)

    for :math:`n` workers with :math:`d` coordinates each and :math:`s` levels. The common norm must
    be at most the l2 norm of the concatenation. At :math:`n = 1` this is the bound of QSGD. (The
    paper's own constant for the global operator is sqrt(d) / (n s). Measured variances exceed it.)

    Args:
      size: :math:`d`, the number of one worker's coordinates that share the norm.
      levels: :math:`s`.
      workers: :math:`n`.

    Returns:
      :math:`\theta`.

    Example:
      >>> from jaxcomm.compression.quantizers import variance_constant
      >>> variance_constant(size=10_000, levels=5, workers=4)
      10.0
    """
    return min(size / levels**2, (size / workers) ** 0.5 / levels)


def _require_static(name: str, value: object) -> None:
    if value is not None and not isinstance(value, int):
        raise ValueError(
            f"`{name}` must be a Python int, got {value!r}: it decides shapes on the wire. Under "
            f"`optax.inject_hyperparams` pass `static_args=('levels', 'bits')`."
        )


def round_to_levels(x: jax.Array, norm: jax.Array, levels: int, key: jax.Array) -> jax.Array:
    r"""The codes of :func:`pallas_kernels.quantize.quantize`, unpacked.

    .. math:: c_j = \lfloor s x_j / \|x\| + u_j \rfloor, \quad u_j \sim \mathcal{U}[0, 1),
              \quad |c_j| \le s

    Args:
      x: float32 of any shape.
      norm: float32[], at least the largest magnitude in `x`. For 0 the codes are zeros.
      levels: :math:`s`.
      key: key[], this worker's private key.

    Returns:
      int32 codes of the shape of `x`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.compression.quantizers import round_to_levels
      >>> print(round_to_levels(jnp.array([2.0, -1.0]), jnp.float32(2.0), 2, jax.random.key(0)))
      [ 2 -1]
    """
    return quantize(x, norm, _noise.seeds(key), levels=levels, bits=32)


def dither(
    *,
    levels: int | None = None,
    bits: int | None = None,
    norm: Literal["max", "l2"] = "max",
) -> Codec:
    r"""Unbiased standard dithering: sends a norm, and a small integer per coordinate.

    .. math::
        \mathcal{Q}(x)_j = \frac{\|x\|}{s} \left\lfloor \frac{s x_j}{\|x\|} + u_j \right\rfloor,
        \qquad \mathbb{E}\, \mathcal{Q}(x) = x

    If workers share a norm (reduced over workers), their codes use the same levels and can be
    summed (Global-QSGD). With separate norms, payloads are gathered (QSGD). The same codec serves
    both.

    Args:
      levels: :math:`s`, the number of positive levels; a Python int. Default: 15, or the most that
        `bits` allows.
      bits: The width of a field in bits, 2 to 16 or 32; each coordinate takes 32 / floor(32 / bits)
        bits. Default: the width of least cost in which the sum of all workers' codes cannot
        overflow. If codes are summed, 8 bits have 15 levels for 8 workers, 1 for 64 to 127, and no
        room for more: "What bits mean" in docs/methods.md.
      norm: `"max"`, :math:`\max_j |x_j|`, or `"l2"`. If workers reduce the norm, it is the largest
        magnitude on any worker, or the l2 norm of the concatenation of all workers' vectors.

    Returns:
      A codec. Its payload has one code per coordinate: int8, fields in uint32 words, or int32. Its
      statistic is one float32 for `"max"` and three for `"l2"`. `combine` is `"sum"`. It states its
      `variance`, :math:`\omega = \min(n d / s^2, \sqrt{n d} / s)` over `n` workers that share a
      norm; see :func:`variance_constant`. float64 input is quantized in float32.

    Raises:
      ValueError: If `levels`, `bits` or `norm` is out of range, or, when encoding, if `bits` cannot
        hold the sum of all workers' codes.
      TypeError: If it is differentiated: rounding has no derivative.

    Warns:
      UserWarning: When encoding, if `bits` leaves fewer than 4 levels.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.quantizers import dither
      >>> codec, x = dither(levels=2, bits=8), jnp.array([1.0, -0.5, 0.3])
      >>> context = Context.of(x)
      >>> payload, _ = codec.encode(context.replace(statistics=codec.measure(context, x)), x)
      >>> payload.codes.dtype, [int(code) for code in payload.codes[:2]]
      (dtype('int8'), [2, -1])

    References:
      Xin et al., `Global-QSGD <https://arxiv.org/abs/2305.18627>`_, 2023.
      Alistarh et al., `QSGD <https://arxiv.org/abs/1610.02132>`_, 2017.

    Differs from the papers: one floor rounds the signed value; the papers round the magnitude. The
    distribution is the same. The released code of Global-QSGD uses 127/n levels, not rounded down,
    and may overflow; here the sum of the codes always fits.
    """
    _require_static("levels", levels)
    _require_static("bits", bits)
    if levels is not None and not 1 <= levels <= _fields.MOST_LEVELS:
        raise ValueError(f"`levels` must be in [1, {_fields.MOST_LEVELS}], got {levels}.")
    if bits is not None and bits not in _fields.WIDTHS:
        raise ValueError(f"`bits` must be in [2, 16], or 32, got {bits}.")
    if norm not in _norms.NORMS:
        raise ValueError(f"`norm` must be one of {tuple(_norms.NORMS)}, got {norm!r}.")
    chosen = _norms.NORMS[norm]
    if levels is None and bits is None:
        levels = DEFAULT_LEVELS

    def measure(context: Context, x: jax.Array) -> _norms.Statistics:
        return chosen.measure(*nondifferentiable("dither", x))

    def chosen_field(context: Context) -> _fields.Field:
        field = _fields.choose_field(levels, bits, context.workers)
        if levels is None and field.levels < FEW_LEVELS:
            constant = variance_constant(context.size, field.levels, context.workers)
            warnings.warn(
                f"`bits`={bits} leaves {field.levels} levels for each of {context.workers} "
                f"workers: for {context.size} coordinates the variance constant is "
                f"{constant:.3g}. Use more bits.",
                UserWarning,
                stacklevel=3,
            )
        return field

    def encode(context: Context, x: jax.Array) -> tuple[DitherPayload, Memory]:
        field = chosen_field(context)
        norm, seeds = chosen.value(context.statistics), _noise.seeds(context.coins.private)
        codes = quantize(x, norm, seeds, levels=field.levels, bits=field.width)
        return DitherPayload(codes), context.memory

    def with_residual(
        context: Context, x: jax.Array, kept: jax.Array, divisor: float
    ) -> tuple[DitherPayload, Memory, jax.Array]:
        field = chosen_field(context)
        codes, rest = quantize(
            x.astype(jnp.float32),
            chosen.value(context.statistics),
            _noise.seeds(context.coins.private),
            levels=field.levels,
            bits=field.width,
            residual=True,
            added=kept,
            divisor=divisor,
        )
        return DitherPayload(codes), context.memory, rest

    def decode_onto(
        context: Context, payload: DitherPayload, total: jax.Array | None, divisor: float
    ) -> jax.Array:
        field = _fields.choose_field(levels, bits, context.workers)
        return dequantize(
            payload.codes,
            chosen.value(context.statistics) / divisor,
            levels=field.levels,
            bits=field.width,
            count=context.count,
            shape=context.shape,
            accumulate=total,
        )

    def decode(context: Context, payload: DitherPayload) -> jax.Array:
        return decode_onto(context, payload, None, 1.0)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        field = _fields.choose_field(levels, bits, context.workers)
        return Diagnostics(target=x, constants={"levels": field.levels})

    def variance(size: int, workers: int) -> float:
        # The constant bounds the variance of the mean; the sum over n workers has n times that.
        field = _fields.choose_field(levels, bits, workers)
        return workers * variance_constant(size, field.levels, workers)

    def alphabet(context: Context) -> Alphabet:
        field = _fields.choose_field(levels, bits, context.workers)
        return Alphabet(-field.levels, field.levels)

    def split(context: Context, payload: DitherPayload) -> tuple[jax.Array, tuple[()]]:
        field = _fields.choose_field(levels, bits, context.workers)
        return _fields.unpack(payload.codes, field, 1, context.shape).ravel(), ()

    def join(context: Context, codes: jax.Array, rest: tuple[()]) -> DitherPayload:
        field = _fields.choose_field(levels, bits, context.workers)
        return DitherPayload(_fields.pack(codes.reshape(context.shape), field))

    def likely(size: int) -> np.ndarray | None:
        most = _fields.choose_field(levels, bits, 1).levels
        return rounded_normal(-most, most, most / chosen.of_normal(size))

    integers = Integers(
        "levels",
        alphabet,
        number=lambda context: math.prod(context.shape),
        split=split,
        join=join,
        likely=likely,
    )
    return Codec(
        encode=encode,
        decode=decode,
        measure=measure,
        reduce_statistics=chosen.reduce_statistics,
        combine="sum",
        diagnose=diagnose,
        claims=Claims(variance=variance),
        layout="shared_statistics",
        fast=Fast(integers=integers, with_residual=with_residual, add=decode_onto),
    )
