"""Dithering with few levels: ternary codes, and the nonzero codes alone."""

import math
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomm._contract import Claims, Codec, Context, Diagnostics, Fast, Memory, PyTree
from jaxcomm._require import AboveZero, Positive, Range, checked
from jaxcomm.compression import _support
from jaxcomm.compression._bits import require_countable, rounded_normal
from jaxcomm.compression._means import over_peak
from jaxcomm.compression._overflow import (
    Overflow,
    Policy,
    choose_form,
    decoded_to_nan,
    diagnose_overflow,
    nan_unless,
)
from jaxcomm.compression.quantizers import _dither
from jaxcomm.compression.quantizers._dither import dither, round_to_levels
from pallas_kernels._dispatch import nondifferentiable
from pallas_kernels.quantize.reference import level_step


def _clipped(x: jax.Array, clip: float) -> jax.Array:
    """Clips `x` to `clip` root mean squares, computed without overflow for huge coordinates."""
    peak = jnp.max(jnp.abs(x), initial=0)
    unit = over_peak(x, peak)
    deviation = jnp.sqrt(jnp.sum(jnp.square(unit)) / float(max(x.size, 1)))
    limit = peak * jnp.minimum(clip * deviation, 1)
    return jnp.clip(x, -limit, limit)


@checked
def ternary(*, clip: AboveZero | None = None) -> Codec:
    r"""TernGrad's codes: unbiased rounding of each magnitude to the largest one or to 0.

    .. math:: Q(x)_j = s\, \operatorname{sgn}(x_j)\, b_j, \qquad
              P(b_j = 1) = \frac{|x_j|}{s}, \qquad s = \max_j |x_j|

    .. math:: \mathbb{E}\, Q(x) = x, \qquad
              \mathbb{E}\|Q(x) - x\|^2 = s \|x\|_1 - \|x\|^2 \le \frac{\sqrt d - 1}{2} \|x\|^2

    This is :func:`dither` with one level. The bound is attained. One worker's codes take 2 bits per
    coordinate. If workers share the scale (the largest over workers), codes are added in fields of
    :math:`b` bits that hold the sum, :math:`2 n < 2^b`, and the equations hold for all :math:`n d`
    coordinates together.

    Args:
      clip: Clips magnitudes first, to this number of standard deviations of the unit (a bucket or a
        leaf). This makes :math:`s` smaller and the codes less noisy, but biased. The paper takes
        2.5. A Python float. Default: no clipping.

    Returns:
      A codec. Without clipping it states its `variance`. `combine` is `"sum"`. The statistic is one
      float32.

    Raises:
      ValueError: If `clip` is not a positive Python number.
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.quantizers import ternary
      >>> codec, x = ternary(), jnp.array([2.0, -2.0, 0.0])
      >>> context = Context.of(x)
      >>> context = context.replace(statistics=codec.measure(context, x))
      >>> payload, _ = codec.encode(context, x)
      >>> print(codec.decode(context, payload), codec.claims.variance(81, 1))
      [ 2. -2.  0.] 4.0

    References:
      Wen et al., `TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning
      <https://arxiv.org/abs/1705.07878>`_, 2017.

    Differs from the paper: standard deviations are about 0 and not about the mean, so that a leaf
    of one coordinate, or of equal ones, is not clipped to nothing.
    """
    codec = dither(levels=1).replace(scope="leaf")
    if clip is None:
        return codec.replace(
            claims=Claims(variance=lambda size, workers: (max(size * workers, 1) ** 0.5 - 1) / 2)
        )

    def measure(context: Context, x: jax.Array) -> PyTree:
        return codec.measure(context, _clipped(x, clip))

    def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        return codec.encode(context, _clipped(x, clip))

    clipped = codec.fast.integers._replace(likely=lambda size: rounded_normal(-1, 1, 1 / clip))
    return codec.replace(
        measure=measure,
        encode=encode,
        claims=Claims(),
        layout="concatenated",
        fast=Fast(integers=clipped, add=codec.fast.add),
    )


class SparseDitherPayload(NamedTuple):
    """The payload of one unit: up to `capacity` codes, and the number of nonzero ones."""

    indices: jax.Array  # uint16[capacity], or uint32 from 2**16 coordinates on
    codes: jax.Array  # uint32[ceil(capacity / lanes)], int8[capacity] or int32[capacity]
    total: jax.Array  # uint32[]


@checked
def sparse_dither(
    *,
    levels: Annotated[int, Range(least=1, most=2**15 - 1)] = 1,
    capacity: Positive,
    norm: Literal["max", "l2"] = "l2",
    overflow: Policy = "nan",
) -> Codec:
    r"""Standard dithering that sends the nonzero codes and their indices.

    .. math:: \{(j, c_j) : c_j \ne 0\}, \qquad c_j = \lfloor s x_j / \|x\| + u_j \rfloor

    With :math:`s` levels of the l2 norm over all :math:`n` workers, the workers together send at
    most :math:`s (s + \sqrt{n d})` nonzeros in expectation. With separate norms they send at most
    :math:`n s (s + \sqrt d)`, which is :math:`\sqrt n` times as many for :math:`d \gg s^2`. The
    capacity is fixed at trace time. If there are more nonzeros, the update becomes NaN, since
    dropping some of them adds bias. With `overflow="drop"` the codec sends `capacity` consecutive
    nonzeros, starting at a random one.

    Args:
      levels: :math:`s`, the number of positive levels; a Python int.
      capacity: The largest number of codes sent for one worker's unit; a Python int. The number of
        nonzeros has a standard deviation of about the square root of its expectation. With a
        capacity of about three standard deviations above the expectation, a unit overflows in one
        of a thousand steps.
      norm: `"l2"` or `"max"`.
      overflow: If there are more nonzeros than `capacity`: `"nan"`, or `"drop"` to drop the excess.
        `diagnostics=True` reports the size of the excess as `overflow`.

    Returns:
      A codec. Its payload has an index of 16 or 32 bits and a code for each entry, and a count.
      `combine` is `None`.

    Raises:
      ValueError: If an option is out of range.
      TypeError: If it is differentiated: rounding has no derivative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.quantizers import sparse_dither
      >>> codec, x = sparse_dither(capacity=2), jnp.zeros(100).at[7].set(-3.0)
      >>> context = Context.of(x, memory=codec.init(x))
      >>> context = context.replace(statistics=codec.measure(context, x))
      >>> payload, _ = codec.encode(context, x)
      >>> print(codec.decode(context, payload)[7])
      -3.0
    """
    chosen, field = _dither.NORMS[norm], _dither.choose_field(levels, None, 1)

    def codes_of(context: Context, x: jax.Array) -> jax.Array:
        require_countable(x.size)
        # `nonzero` and `at` need an element.
        flat = x.ravel() if x.size else jnp.zeros(1, jnp.float32)
        norm = chosen.value(context.statistics)
        return round_to_levels(flat, norm, levels, context.keys.private)

    def to_payload(codes: jax.Array, indices: jax.Array) -> SparseDitherPayload:
        values = codes.at[indices].get(mode="fill", fill_value=0)
        index_type = jnp.uint16 if codes.size < 2**16 else jnp.uint32
        total = jnp.sum(codes != 0, dtype=jnp.uint32)
        packed = _dither.pack(values, field)
        return SparseDitherPayload(indices.astype(index_type), packed, total)

    def encode(context: Context, x: jax.Array) -> tuple[SparseDitherPayload, Memory]:
        codes = codes_of(context, x)
        parts = _support.Parts(codes.size, 1, codes.size)
        # Rounding already uses the key itself.
        start = jax.random.fold_in(context.keys.private, 0x0F)
        payload = to_payload(
            codes, _support.window(_support.bitmap(codes, parts), start, capacity, parts)
        )
        dropped = jnp.maximum(payload.total.astype(jnp.int32) - capacity, 0)
        return payload, context.memory._replace(report=Overflow(dropped))

    def decode(context: Context, payload: SparseDitherPayload) -> jax.Array:
        codes = _dither.unpack(payload.codes, field, 1, (capacity,)).astype(jnp.float32)
        scale = chosen.value(context.statistics)
        values = codes * level_step(scale, levels * context.count)
        indices = payload.indices.astype(jnp.uint32)
        size = math.prod(context.shape)
        dense = jnp.zeros(max(size, 1), jnp.float32).at[indices].set(values, mode="drop")[:size]
        return nan_unless(jnp.isfinite(scale), dense).reshape(context.shape)  # All codes are 0.

    def fits(context: Context, payload: SparseDitherPayload) -> jax.Array:
        return payload.total <= capacity

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        return diagnose_overflow(context, x, after)._replace(constants={"levels": levels})

    drop_overflow = Codec(
        encode=encode,
        decode=decode,
        measure=lambda context, x: chosen.measure(*nondifferentiable("sparse_dither", x)),
        reduce_statistics=chosen.reduce_statistics,
        diagnose=diagnose,
    )
    return choose_form(overflow, drop_overflow, decoded_to_nan(drop_overflow, fits))
