r"""Standard dithering: unbiased stochastic rounding to uniform fractions of a norm.

With :math:`\ell_q` over the coordinates of a worker and :math:`\ell_p` over workers,
:math:`\|x\|_{q,p} = (\sum_i \|x_i\|_q^p)^{1/p}` (Xin et al., 2023). Both norms here have p = q.

Codes :math:`c_i \in [-s, s]` of :math:`n` workers add up to at most :math:`n s` in magnitude. A
field of :math:`b` bits holds the sum if :math:`2 n s < 2^b`. Codes of 8 bits are sent as int8, and
those of 32 bits as int32. All other widths are sent with a bias: a uint32 word holds as many
fields :math:`c_i + s` as fit, none of which carries into its neighbor. A coordinate takes
:math:`32 / \lfloor 32 / b \rfloor` bits. Widths that do not divide 32 evenly waste some: 7 and 9
cost as much as 8 and 10, and 11 to 15 as much as 16. int16 is not used, since XLA widens its
all-reduce on GPU.
"""

import functools
import math
import warnings
from collections.abc import Callable
from statistics import NormalDist
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm import _noise
from jaxcomm._contract import Claims, Codec, Context, Diagnostics, Fast, Memory
from jaxcomm._require import Range, checked
from jaxcomm.compression._bits import Alphabet, CodesPayload, Integers, rounded_normal
from jaxcomm.compression._means import over_peak
from pallas_kernels._dispatch import nondifferentiable
from pallas_kernels.pack import pack as pack_fields
from pallas_kernels.pack import unpack as unpack_fields
from pallas_kernels.quantize import dequantize, quantize
from pallas_kernels.quantize.api import MOST_LEVELS, WIDTHS


class Norm(NamedTuple):
    """A norm computed in two steps, between which statistics may be reduced over workers.

    Attributes:
      measure: `x -> statistics`, a NamedTuple of float32[].
      reduce_statistics: the same NamedTuple of `"max"` or `"sum"`.
      value: `statistics -> float32[]`, the norm of one worker's vector, or of all workers' vectors.
      of_normal: `size -> norm` of that many standard normal numbers; of one thousand draws, about
        one is smaller.
    """

    measure: Callable[[jax.Array], "Statistics"]
    reduce_statistics: "Statistics"
    value: Callable[[Any], jax.Array]
    of_normal: Callable[[int], float]


class MaxAbs(NamedTuple):
    """The statistic of the max norm."""

    max_abs: Any


class SumOfSquares(NamedTuple):
    """The statistic of the l2 norm: three sums of squares, since no float32 spans their range."""

    large: Any  # of norms over 2**40, scaled by 2**-80 before squaring
    medium: Any
    small: Any  # of norms under 2**-40, scaled by 2**80 before squaring


Statistics: TypeAlias = MaxAbs | SumOfSquares


def l2_norm(x: jax.Array) -> jax.Array:
    """The l2 norm, finite and exact to rounding whenever it is a normal float32."""
    peak = jnp.max(jnp.abs(x), initial=0)
    return peak * jnp.sqrt(jnp.sum(jnp.square(over_peak(x, peak))))


def _l2_measure(x: jax.Array) -> SumOfSquares:
    norm = l2_norm(x)
    large, small = norm > 2.0**40, norm < 2.0**-40
    return SumOfSquares(
        large=jnp.square(jnp.where(large, norm * 2.0**-80, 0)),
        medium=jnp.square(jnp.where(large | small, 0, norm)),
        small=jnp.square(jnp.where(small, norm * 2.0**80, 0)),
    )


def _l2_value(squares: SumOfSquares) -> jax.Array:
    large, medium, small = map(jnp.sqrt, squares)
    return l2_norm(jnp.stack([large * 2.0**80, medium, small * 2.0**-80]))


def small_peak(size: int) -> float:
    """The largest magnitude of standard normal numbers exceeds it in 999 of 1000 draws."""
    within = 0.001 ** (1 / size)  # The probability that one number does not exceed it.
    return max(-NormalDist().inv_cdf((1 - within) / 2), 0.1) if within < 1 else 0.1


NORMS = {
    "max": Norm(
        measure=lambda x: MaxAbs(jnp.max(jnp.abs(x), initial=0)),
        reduce_statistics=MaxAbs("max"),
        value=lambda statistics: statistics.max_abs,
        of_normal=small_peak,
    ),
    "l2": Norm(
        measure=_l2_measure,
        reduce_statistics=SumOfSquares("sum", "sum", "sum"),
        value=_l2_value,
        of_normal=lambda size: max(size - 4.4 * size**0.5, 1.0) ** 0.5,
    ),
}


class Field(NamedTuple):
    """The number of levels and the field width of one unit's codes."""

    levels: int  # s, each worker's codes are in [-s, s]
    width: int  # bits of a code, without the bits that a word wastes


def most_levels(width: int, workers: int) -> int:
    """The largest `s` whose sum over `workers` fits in `width` bits; 0 if no level fits."""
    return min((2**width - 1) // (2 * workers), MOST_LEVELS)


@functools.cache
def choose_field(levels: int | None, bits: int | None, workers: int) -> Field:
    """Completes `levels` and `bits` such that the sum of `workers` codes cannot overflow.

    Without `bits`, chooses the width of least cost; among equal costs, the widest.

    Raises:
      ValueError: If the sum can overflow; the message names the smallest width that works.
    """
    needed = levels or 1
    fitting = [width for width in WIDTHS if 2 * workers * needed < 2**width]
    _, cheapest = max([(32 // width, width) for width in fitting], default=(0, 0))
    width = cheapest if bits is None else bits
    if width not in fitting:
        raise ValueError(
            f"`bits`={bits} cannot hold the sum of {needed} levels over {workers} workers: the "
            f"smallest width that works is {fitting[0] if fitting else 'over 32'} bits."
        )
    return Field(levels or most_levels(width, workers), width)


def pack(codes: jax.Array, field: Field) -> jax.Array:
    """Packs codes in [-s, s] for sending: int8[shape], int32[shape], or uint32[ceil(size / lanes)].

    `lanes` is the number of codes in a 32-bit word, `32 // field.width`.

    Args:
      codes: int32 of any shape.
      field: The field.
    """
    if field.width == 8:
        return codes.astype(jnp.int8)
    if field.width == 32:
        return codes
    return pack_fields((codes + field.levels).astype(jnp.uint32), bits=field.width)


def unpack(words: jax.Array, field: Field, count: int, shape: tuple[int, ...]) -> jax.Array:
    """The sums of `count` codes, int32[shape], from the sum of `count` packed arrays."""
    if field.width in (8, 32):
        return words.astype(jnp.int32)
    biased = unpack_fields(words, bits=field.width, shape=shape)
    return biased.astype(jnp.int32) - count * field.levels


DEFAULT_LEVELS = 15


FEW_LEVELS = 4


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
      >>> from jaxcomm.compression.quantizers._dither import variance_constant
      >>> variance_constant(size=10_000, levels=5, workers=4)
      10.0
    """
    return min(size / levels**2, (size / workers) ** 0.5 / levels)


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
      >>> from jaxcomm.compression.quantizers._dither import round_to_levels
      >>> print(round_to_levels(jnp.array([2.0, -1.0]), jnp.float32(2.0), 2, jax.random.key(0)))
      [ 2 -1]
    """
    return quantize(x, norm, _noise.seeds(key), levels=levels, bits=32)


@checked
def dither(
    *,
    levels: Annotated[int, Range(least=1, most=MOST_LEVELS)] | None = None,
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
        overflow. If codes are summed, 8 bits have 15 levels for 8 workers and 1 for 64 to 127. They
        do not suffice for more workers: "What bits mean" in docs/methods.md.
      norm: `"max"`, :math:`\max_j |x_j|`, or `"l2"`. If workers reduce the norm, it is the largest
        magnitude on any worker, or the l2 norm of the concatenation of all workers' vectors.

    Returns:
      A codec. Its payload has one code per coordinate: int8, fields in uint32 words, or int32. Its
      statistic is one float32 for `"max"` and three for `"l2"`. `combine` is `"sum"`. It states its
      `variance`, :math:`\omega = \min(n d / s^2, \sqrt{n d} / s)` over `n` workers that share a
      norm. float64 input is quantized in float32.

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
    if bits is not None and bits not in WIDTHS:
        raise ValueError(f"`bits` must be in [2, 16], or 32, got {bits}.")
    chosen = NORMS[norm]
    if levels is None and bits is None:
        levels = DEFAULT_LEVELS

    def measure(context: Context, x: jax.Array) -> Statistics:
        return chosen.measure(*nondifferentiable("dither", x))

    def field_of(context: Context) -> Field:
        return choose_field(levels, bits, context.workers)

    def chosen_field(context: Context) -> Field:
        field = field_of(context)
        if levels is None and field.levels < FEW_LEVELS:
            constant = variance_constant(context.size, field.levels, context.workers)
            warnings.warn(
                f"`bits`={bits} leaves {field.levels} levels for each of {context.workers} "
                f"workers: for {context.size} coordinates the variance constant is "
                f"{constant:.3g}. Use more bits.",
                UserWarning,
                stacklevel=4,
            )
        return field

    def coded(context: Context, x: jax.Array, **residual: Any) -> Any:
        field = chosen_field(context)
        norm, seeds = chosen.value(context.statistics), _noise.seeds(context.keys.private)
        return quantize(x, norm, seeds, levels=field.levels, bits=field.width, **residual)

    def encode(context: Context, x: jax.Array) -> tuple[CodesPayload, Memory]:
        return CodesPayload(coded(context, x)), context.memory

    def with_residual(
        context: Context, x: jax.Array, kept: jax.Array, divisor: float
    ) -> tuple[CodesPayload, Memory, jax.Array]:
        wide = x.astype(jnp.float32)
        codes, rest = coded(context, wide, residual=True, added=kept, divisor=divisor)
        return CodesPayload(codes), context.memory, rest

    def decode_onto(
        context: Context, payload: CodesPayload, total: jax.Array | None, divisor: float
    ) -> jax.Array:
        field, norm = field_of(context), chosen.value(context.statistics)
        return dequantize(
            payload.codes,
            norm / divisor,
            levels=field.levels,
            bits=field.width,
            count=context.count,
            shape=context.shape,
            accumulate=total,
        )

    def decode(context: Context, payload: CodesPayload) -> jax.Array:
        return decode_onto(context, payload, None, 1.0)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        return Diagnostics(target=x, constants={"levels": field_of(context).levels})

    def variance(size: int, workers: int) -> float:
        # The constant bounds the variance of the mean; the sum over n workers has n times that.
        most = choose_field(levels, bits, workers).levels
        return workers * variance_constant(size, most, workers)

    def alphabet(context: Context) -> Alphabet:
        most = field_of(context).levels
        return Alphabet(math.prod(context.shape), -most, most)

    def split(context: Context, payload: CodesPayload) -> tuple[jax.Array, tuple[()]]:
        return unpack(payload.codes, field_of(context), 1, context.shape).ravel(), ()

    def join(context: Context, codes: jax.Array, rest: tuple[()]) -> CodesPayload:
        return CodesPayload(pack(codes.reshape(context.shape), field_of(context)))

    def likely(size: int) -> np.ndarray | None:
        most = choose_field(levels, bits, 1).levels
        return rounded_normal(-most, most, most / chosen.of_normal(size))

    return Codec(
        encode=encode,
        decode=decode,
        measure=measure,
        reduce_statistics=chosen.reduce_statistics,
        combine="sum",
        diagnose=diagnose,
        claims=Claims(variance=variance),
        layout="shared_statistics",
        fast=Fast(
            exposes_nonfinite=("decode",),
            integers=Integers("levels", alphabet, split, join, likely),
            with_residual=with_residual,
            add=decode_onto,
        ),
    )
