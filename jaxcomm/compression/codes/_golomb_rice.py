"""The Golomb-Rice code of gaps, between coordinates that are not 0 or between sent indices."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import Codec
from jaxcomm.compression._integers import Alphabet
from jaxcomm.compression._overflow import Policy
from jaxcomm.compression.codes._elias import (
    Gamma,
    any_gap,
    gamma,
    positive_of,
    require_magnitudes,
    signed,
)
from jaxcomm.compression.codes._rows import (
    CONSTANT,
    BitFields,
    Length,
    RowCode,
    Stream,
    Written,
    after_zeros,
    low_bits,
    or_plain,
    plain_bits,
    plain_words,
    read_plain,
    read_rows,
    window,
)
from jaxcomm.compression.codes._variable_length import variable_length

MOST = 1024
MOST_ZEROS = 16
"""A quotient this large is not sent in unary: the gap follows in its fixed width."""

MOST_PARAMETER = 29
GOLDEN_RATIO = (1 + 5**0.5) / 2
LEAST_MEANS = [
    1 / math.expm1(-math.log(GOLDEN_RATIO - 1) / 2 ** (k - 1)) for k in range(1, MOST_PARAMETER + 1)
]
"""The least mean of the gaps from which the parameter is 1, 2, ..."""


MOST_IN_ONE_FIELD = 2**10 - 1
"""A level up to this one has at most 20 bits. The gap before it has at most 12 after its zeros."""


class GapState(NamedTuple):
    """What reading levels carries from one coordinate to the next, int32[rows] each."""

    bit: jax.Array
    zeros: jax.Array  # coordinates until the next one that is not 0


def rice_parameter(gaps: jax.Array, count: jax.Array) -> jax.Array:
    r"""The best parameter for geometric gaps of mean :math:`\mu` = gaps / count (Kiely, 2004).

    .. math:: k = \max\Big(0, 1 + \Big\lfloor \log_2 \frac{\ln(\varphi - 1)}
              {\ln(\mu / (\mu + 1))} \Big\rfloor\Big), \qquad \varphi = \frac{1 + \sqrt 5}{2}

    Args:
      gaps: int32[rows], their sum in each row.
      count: int32[rows], their number.

    Returns:
      int32[rows], 0 to 29.
    """
    # One product and one comparison each, so that compiled and other programs agree.
    total, number = gaps.astype(jnp.float32), count.astype(jnp.float32)
    reached = [(total >= mean * number).astype(jnp.int32) for mean in LEAST_MEANS]
    return sum(reached[1:], reached[0])


def rice(gaps: jax.Array, parameter: jax.Array, width: int) -> Gamma:
    """The code of int32 gaps: `gap >> k` zeros, a one, and the `k` lowest bits of the gap.

    From 16 zeros on, it is 16 zeros, a one, and the gap in `width` bits.
    """
    quotient = gaps >> parameter
    is_long = quotient >= MOST_ZEROS
    kept = jnp.where(is_long, width, parameter)
    rest = gaps.astype(jnp.uint32) & low_bits(kept)
    return Gamma(jnp.minimum(quotient, MOST_ZEROS), (rest << 1) | 1, kept + 1)


def read_rice(
    low: jax.Array, high: jax.Array, parameter: jax.Array, width: int
) -> tuple[jax.Array, jax.Array]:
    """The gap at the start of the bits and the number of its bits, int32 each."""
    zeros, rest = after_zeros(low, high)
    is_long = zeros >= MOST_ZEROS
    kept = jnp.where(is_long, width, parameter)
    value = ((rest >> 1) & low_bits(kept)).astype(jnp.int32)
    gap = jnp.where(is_long, value, (zeros << parameter) | value)
    return gap, zeros + 1 + kept


def _gap_width(n: int) -> int:
    """The bits of a gap in a row of `n` coordinates: it may reach the end."""
    return n.bit_length()


def _level(rows: jax.Array, alphabet: Alphabet) -> Gamma:
    """The code of a level that is not 0: a sign, after its magnitude unless that is always 1."""
    if max(-alphabet.low, alphabet.high) > 1:
        return signed(gamma(jnp.maximum(jnp.abs(rows), 1).astype(jnp.uint32)), rows < 0)
    nothing = jnp.zeros(rows.shape, jnp.int32)
    return signed(Gamma(nothing, nothing.astype(jnp.uint32), nothing), rows < 0)


def _gaps_before(here: jax.Array) -> jax.Array:
    """The zeros before each coordinate since the last one that is sent, int32[n + 1, rows].

    The last gap reaches the end of the row, so that reading needs no count.
    """

    def count(zeros: jax.Array, here: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.where(here, 0, zeros + 1), zeros

    first = _axis.varying_like(jnp.zeros(here.shape[1], jnp.int32), here)
    last, gaps = lax.scan(count, first, here)
    return jnp.concatenate([gaps, last[None]])


def _joined(first: Gamma, then: Gamma) -> Gamma:
    """The first code and the one after it as one, of at most 32 bits after its zeros."""
    before = first.width + then.zeros
    bits = first.bits | (then.bits << before.astype(jnp.uint32))
    return Gamma(first.zeros, bits, before + then.width)


def _write_levels(rows: jax.Array, alphabet: Alphabet) -> Written:
    n, number = rows.shape
    here = rows != 0
    ones = jnp.sum(here, axis=0, dtype=jnp.int32)
    parameter = rice_parameter(n - ones, ones + 1)
    of_gaps = rice(_gaps_before(here), parameter[None], _gap_width(n))
    sent = jnp.concatenate([here, jnp.ones((1, number), bool)])
    of_gaps = Gamma(*(jnp.where(sent, x, 0) for x in of_gaps))
    of_levels = Gamma(*(jnp.where(here, x, 0) for x in _level(rows, alphabet)))

    before, last = (Gamma(*(x[part] for x in of_gaps)) for part in (slice(n), slice(n, None)))
    if max(-alphabet.low, alphabet.high) <= MOST_IN_ONE_FIELD:
        turns = [_joined(before, of_levels)]
    else:
        turns = [before, of_levels]

    def in_turn(last: jax.Array, *turns: jax.Array) -> jax.Array:
        fields = jnp.stack(turns, axis=1).reshape(len(turns) * n, number)
        return jnp.concatenate([fields, last])

    # Writing takes as long as there are fields, also of no bits.
    fields = BitFields(*map(in_turn, last, *turns))
    return or_plain(fields, parameter, rows, alphabet)


def _read_levels(stream: Stream, n: int, alphabet: Alphabet) -> jax.Array:
    is_plain, of_plain = stream.parameter >= CONSTANT, plain_bits(stream, alphabet)
    k = jnp.where(is_plain, 0, stream.parameter)
    has_magnitudes = max(-alphabet.low, alphabet.high) > 1

    def level_of(low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The level at the start of the bits and the number of its bits."""
        if not has_magnitudes:
            return 1 - 2 * (low & 1).astype(jnp.int32), jnp.ones(low.shape, jnp.int32)
        zeros, rest = after_zeros(low, high)
        magnitude = positive_of(zeros, rest)
        negative = (rest >> (zeros + 1).astype(jnp.uint32)) & 1
        return jnp.where(negative == 1, -magnitude, magnitude), 2 * zeros + 2

    def step(state: GapState, bits_at: Any) -> tuple[GapState, jax.Array]:
        low, high = bits_at(state.bit)
        level, of_level = level_of(low, high)
        after_level = bits_at(state.bit + of_level)
        gap, of_gap = read_rice(after_level[0], after_level[1], k, _gap_width(n))
        here = state.zeros == 0
        used = jnp.where(here, of_level + of_gap, 0)
        after = GapState(
            state.bit + jnp.where(is_plain, of_plain, used),
            jnp.where(here, gap, state.zeros - 1),
        )
        level = jnp.where(here, level, 0)
        return after, jnp.where(is_plain, read_plain(low, alphabet), level)

    start = window(stream.words, stream.starts, jnp.zeros(len(stream.starts), jnp.int32))
    gap, used = read_rice(start[0], start[1], k, _gap_width(n))
    return read_rows(step, GapState(jnp.where(is_plain, 0, used), gap), stream, n)


def _write_gaps(rows: jax.Array, alphabet: Alphabet) -> Written:
    # The sum of distinct indices' gaps is below their range, so it is an int32.
    count = jnp.full(rows.shape[1], len(rows), jnp.int32)
    parameter = rice_parameter(jnp.sum(rows, axis=0, dtype=jnp.int32), count)
    fields = BitFields(*rice(rows, parameter[None], alphabet.width))
    return or_plain(fields, parameter, rows, alphabet)


def _read_gaps(stream: Stream, n: int, alphabet: Alphabet) -> jax.Array:
    is_plain, of_plain = stream.parameter >= CONSTANT, plain_bits(stream, alphabet)
    k = jnp.where(is_plain, 0, stream.parameter)

    def step(bit: jax.Array, bits_at: Any) -> tuple[jax.Array, jax.Array]:
        low, high = bits_at(bit)
        gap, used = read_rice(low, high, k, alphabet.width)
        used = jnp.where(is_plain, of_plain, used)
        return bit + used, jnp.where(is_plain, read_plain(low, alphabet), gap)

    return read_rows(step, jnp.zeros(len(stream.starts), jnp.int32), stream, n)


def parameter_for(density: float) -> int:
    """:func:`rice_parameter` of the gaps between a fraction `density` of all coordinates."""
    if density >= 1:
        return 0
    ratio = math.log(GOLDEN_RATIO - 1) / math.log1p(-density)
    return min(max(0, 1 + math.floor(math.log2(ratio))), MOST_PARAMETER)


def _bits_of_gaps(density: float) -> Length:
    """The mean and variance of `q + 1 + k`, with P(q >= i) = (1 - p)^(2^k i)."""
    k = parameter_for(density)
    again = (1 - density) ** 2**k
    return Length(again / (1 - again) + 1 + k, again / (1 - again) ** 2)


def _bits_of_levels(probabilities: np.ndarray) -> Length:
    """Of a coordinate: with the probability that it is not 0, a gap and a level."""
    zero = (len(probabilities) - 1) // 2
    density = 1 - float(probabilities[zero])
    if density <= 0:
        return Length(0.0, 0.0)
    magnitudes = np.abs(np.arange(len(probabilities)) - zero)
    of_level = np.where(
        len(probabilities) > 3, 2 * np.floor(np.log2(np.maximum(magnitudes, 1))) + 2, 1
    )
    weights = np.where(magnitudes > 0, probabilities, 0) / density
    level = float(weights @ of_level)
    spread = float(weights @ np.square(of_level)) - level**2
    gap = _bits_of_gaps(density)
    each = gap.mean + level
    return Length(
        density * each, density * (gap.variance + spread) + density * (1 - density) * each**2
    )


LEVELS = RowCode(
    MOST, require_magnitudes, _write_levels, _read_levels, plain_words, _bits_of_levels
)
GAPS = RowCode(MOST, any_gap, _write_gaps, _read_gaps, plain_words, _bits_of_gaps)


def golomb_rice(
    codec: Codec,
    *,
    room: float | None = None,
    overflow: Policy = "nan",
) -> Codec:
    r"""Sends the gaps between nonzeros in the Golomb-Rice code, and their levels, without loss.

    .. math:: \ell(g) = \lfloor g / 2^k \rfloor + 1 + k

    bits for a gap :math:`g`: as many zeros as :math:`2^k` fits into it, a one, and its :math:`k`
    lowest bits. Each row of up to 1,024 integers has its own :math:`k`, the best one for geometric
    gaps of the row's mean. From :math:`16 \cdot 2^k` on, a gap takes 17 bits and its fixed width.

    - If `codec` has a level for each coordinate, gaps are those between coordinates whose level
      is not 0. The level follows: its magnitude in the Elias-gamma code, unless that is always 1,
      and its sign. Use it if most levels are 0.
    - If `codec` sends indices, gaps are those between them.

    Sends `room` bits per integer and 256 bytes, and 2 bytes per row, but no more than the plain
    form of a fixed width. All other arrays of the payload, and statistics, are those of `codec`.
    The room is sent whether it is used or not.

    Args:
      codec: A codec of integers without memory, as in :func:`elias`.
      room: Bits per integer, a Python float; of levels, per coordinate. As in :func:`elias`;
        indices are taken for independent positions.
      overflow: `"nan"` or `"drop"`, as in :func:`elias`.

    Returns:
      A codec with the claims of `codec`. `combine` is `None`: gather its payloads.

    Raises:
      ValueError: If an argument is out of range, or `codec` does not state its integers. When
        encoding, if `room` is None and the codec's typical integers are not known.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.codes import golomb_rice
      >>> from jaxcomm.compression.sparsifiers import top_k
      >>> x = jnp.array([0.0, 5.0, 1.0, 0.0, -7.0])
      >>> codec = golomb_rice(top_k(k=2))
      >>> context = Context.of(x, memory=codec.init(x))
      >>> print(codec.decode(context.received(), codec.encode(context, x)[0]))
      [ 0.  5.  0.  0. -7.]

    References:
      Golomb, `Run-Length Encodings <https://doi.org/10.1109/TIT.1966.1053907>`_, 1966.
      Rice and Plaunt, `Adaptive Variable-Length Coding for Efficient Compression of Spacecraft
      Television Data <https://doi.org/10.1109/TCOM.1971.1090789>`_, 1971.
      Sattler et al., `Robust and Communication-Efficient Federated Learning from Non-IID Data
      <https://arxiv.org/abs/1903.02891>`_, 2019 (the gaps of sparse ternary compression).

    Differs from the papers: divisors are powers of two, each row has its own, long gaps and rows
    are plain, and the room is fixed.
    """
    return variable_length(
        codec,
        {"levels": LEVELS, "indices": GAPS},
        name="golomb_rice",
        room=room,
        overflow=overflow,
    )
