r"""The definition of `quantize` and `dequantize`, in plain JAX.

Rounding uses fixed point: :math:`s x_j / \|x\|` becomes an integer multiple of :math:`2^{-f}`. Then
a random multiple in :math:`[0, 1)` is added, and the digits after the point are dropped.

Up to 127 levels, :math:`s 2^f < 2^{22}` and the multiple is the nearest one: the float addition of
:math:`1.5 \cdot 2^{23}` leaves it in the lowest bits, so nothing converts a float to an integer.
For more levels, :math:`s 2^f < 2^{31}` and the multiple is truncated by such a conversion.

Every backend returns the same integers. No product is added to anything, so no backend can contract
the two into one operation that rounds once. XLA divides float32 on a GPU by `div.full`, which is
off by up to two units in the last place, and on a TPU by a reciprocal: a factor computed in this
way would change codes. So `divide` divides integers, which is exact on every backend.

Words hold planes: field f of word i is element i of plane f. Kernels pad each plane to a pitch that
their blocks divide. This is free if no padding is needed. Otherwise it costs a pass over the array
before the kernel, and one after it.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _hash
from pallas_kernels.pack.reference import lanes, pack, unpack, words

SMALLEST_NORMAL = 2.0**-126
MOST_BY_ADDITION = 127  # Levels that leave 15 of the 22 digits after the point.
DTYPES = {8: jnp.int8, 32: jnp.int32}  # The widths that are neither packed nor offset.

_LEADING = 1 << 23  # The leading bit of a mantissa, which float32 does not store.


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The biased exponent, int32, and the mantissa, uint32 in [2**23, 2**24)."""
    word = lax.bitcast_convert_type(x, jnp.uint32)
    return (word >> 23).astype(jnp.int32), (word & (_LEADING - 1)) | _LEADING


def divide(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """The quotient of positive normal float32 arrays of one shape, rounded to the nearest.

    The result is arbitrary if the quotient is not a normal number, and for other arguments.
    """
    upper, dividend = _split(numerator)
    lower, divisor = _split(denominator)
    smaller = dividend < divisor
    dividend = jnp.where(smaller, dividend << 1, dividend)
    exponent = upper - lower + jnp.where(smaller, 126, 127)
    # floor(2**24 dividend / divisor): the mantissa, and one more digit for rounding.
    quotient, remainder = jnp.ones_like(dividend), dividend - divisor
    for _ in range(3):  # Eight digits per round: a divisor has 24, so their product fits in 32.
        eight = lax.div(remainder << 8, divisor)
        remainder = (remainder << 8) - eight * divisor
        quotient = (quotient << 8) | eight
    # A quotient of two floats is never halfway between two floats.
    mantissa = (quotient >> 1) + (quotient & 1)
    # The leading bit of the mantissa, or its carry, is added to the exponent.
    word = ((exponent - 1).astype(jnp.uint32) << 23) + mantissa
    return lax.bitcast_convert_type(word, jnp.float32)


def digits(levels: int) -> int:
    """The number of binary digits after the point, `f`."""
    return (22 if levels <= MOST_BY_ADDITION else 31) - levels.bit_length()


def factors(scale: jax.Array, levels: int) -> tuple[jax.Array, jax.Array]:
    """Two factors, float32[], whose product with x is `x levels 2**digits / scale`; 0 for scale 0.

    With one factor, the reciprocal of a tiny scale would overflow. For infinity and NaN the
    product is 0.
    """
    lift = jnp.where(scale < 2.0**-60, jnp.float32(2.0**64), jnp.float32(1))
    usable = (scale >= SMALLEST_NORMAL) & jnp.isfinite(scale)
    most = jnp.full_like(scale, levels * 2.0 ** digits(levels))
    return lift, jnp.where(usable, divide(most, scale * lift), 0)


def round_fixed(
    x: jax.Array, lift: jax.Array, factor: jax.Array, noise: jax.Array, levels: int
) -> jax.Array:
    """int32 codes of float32 `x` and uint32 `noise` of one shape.

    NaN has the code 0, and so do subnormal numbers, because some backends flush them.
    """
    f = digits(levels)
    most = jnp.float32(levels * 2.0**f)
    scaled = x * lift * factor
    # No smaller number than the smallest normal one scales to this, and NaN is not above it.
    smallest = jnp.float32(SMALLEST_NORMAL) * lift * factor
    kept = jnp.where(jnp.abs(scaled) >= smallest, scaled, 0)
    within = lax.clamp(-most, kept, most)
    digits_of_noise = (noise >> (32 - f)).astype(jnp.int32)
    if levels > MOST_BY_ADDITION:
        return (within.astype(jnp.int32) + digits_of_noise) >> f
    # From 2**23 to 2**24 the floats are the integers, and so are their words, less a constant.
    word = lax.bitcast_convert_type(within + jnp.float32(1.5 * 2**23), jnp.int32)
    return ((word + digits_of_noise) >> f) - (0x4B400000 >> f)  # The word of 1.5 * 2**23.


def level_step(scale: jax.Array, levels: int) -> jax.Array:
    """The distance of two levels. `levels` steps of a finite scale never overflow."""
    step = scale / levels
    rounded_up = jnp.isinf(step * levels) & jnp.isfinite(scale)
    return jnp.where(rounded_up, jnp.nextafter(step, jnp.float32(0)), step)


def to_fields(codes: jax.Array, levels: int, bits: int) -> jax.Array:
    """Codes in [-levels, levels] in the format of the wire."""
    if bits in DTYPES:
        return codes.astype(DTYPES[bits])
    return pack((codes + levels).astype(jnp.uint32), bits=bits)


def from_fields(
    fields: jax.Array, levels: int, bits: int, count: int, shape: tuple[int, ...]
) -> jax.Array:
    """Sums of `count` codes, int32 of `shape`."""
    if bits in DTYPES:
        return fields.astype(jnp.int32).reshape(shape)
    return unpack(fields, bits=bits, shape=shape).astype(jnp.int32) - count * levels


def field_sums(word: jax.Array, field: int, levels: int, bits: int, count: int) -> jax.Array:
    """Sums of `count` codes, int32, from one field of each word: `from_fields` for kernels."""
    if bits in DTYPES:
        return word.astype(jnp.int32)
    number = (word >> jnp.uint32(field * bits)) & jnp.uint32(2**bits - 1)
    return number.astype(jnp.int32) - count * levels


def layout(size: int, bits: int) -> tuple[int, int]:
    """The number of planes that `size` elements need, and the number of elements of each."""
    return (1, size) if bits in DTYPES else (lanes(bits), words(size, bits))


def to_planes(x: jax.Array, count: int, width: int, pitch: int) -> jax.Array:
    """`x` of any shape as [count * pitch], padded with zeros."""
    flat = x.ravel()
    if pitch == width:
        return jnp.pad(flat, (0, count * width - x.size))
    # One-dimensional slices: to pad [count, width] on a TPU, XLA moves the array several times.
    planes = (flat[plane * width : (plane + 1) * width] for plane in range(count))
    return jnp.concatenate([jnp.pad(plane, (0, pitch - plane.size)) for plane in planes])


def from_planes(planes: jax.Array, width: int, pitch: int, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_planes`: an array of `shape`."""
    flat = planes.ravel()
    if pitch != width:
        starts = range(0, planes.size, pitch)
        flat = jnp.concatenate([flat[start : start + width] for start in starts])
    return flat[: math.prod(shape)].reshape(shape)


def residual_step(scale: jax.Array, levels: int, divisor: float) -> jax.Array:
    """What a level decodes to, if receivers divide by `divisor`."""
    step = level_step(scale, levels)
    return step if divisor == 1 else step * jnp.float32(1 / divisor)


def quantize(
    x: jax.Array,
    scale: jax.Array,
    seeds: jax.Array,
    added: jax.Array | None = None,
    *,
    levels: int,
    bits: int,
    residual: bool,
    divisor: float = 1.0,
) -> tuple[jax.Array, ...]:
    """The codes of `x + added` in the format of the wire, and the residual if `residual` is true.

    The residual has the dtype of `added`, or of `x` if `added` is None.
    """
    lift, factor = factors(scale, levels)
    noise = _hash.bits(_hash.positions(x.shape), seeds[0], seeds[1])
    wide = x.astype(jnp.float32)
    if added is not None:
        wide = wide + added.astype(jnp.float32)
    codes = round_fixed(wide, lift, factor, noise, levels)
    fields = to_fields(codes, levels, bits)
    if not residual:
        return (fields,)
    rest = wide - codes.astype(jnp.float32) * residual_step(scale, levels, divisor)
    return fields, rest.astype(x.dtype if added is None else added.dtype)


def dequantize(
    codes: jax.Array,
    scale: jax.Array,
    accumulate: jax.Array | None = None,
    *,
    levels: int,
    bits: int,
    count: int,
    shape: tuple[int, ...],
) -> jax.Array:
    """The mean of `count` arrays from the sum of their codes, plus `accumulate` unless None."""
    sums = from_fields(codes, levels, bits, count, shape)
    mean = sums.astype(jnp.float32) * level_step(scale, levels * count)
    return mean if accumulate is None else accumulate + mean
