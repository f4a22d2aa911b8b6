"""The Golomb-Rice code of gaps, between coordinates that are not 0 or between sent indices."""

import bisect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import Codec
from jaxcomm._require import AboveZero, checked
from jaxcomm.compression._bits import Alphabet
from jaxcomm.compression._overflow import Policy
from jaxcomm.compression.codes import _rows
from jaxcomm.compression.codes._elias import after_zeros, gamma, moments, read_gamma, signed

MOST_ZEROS = 16
"""A quotient this large is not sent in unary: the gap follows in its fixed width."""

MOST_IN_ONE_FIELD = 2**10 - 1
"""A level up to this one has at most 20 bits. The gap before it has at most 12 after its zeros."""

GOLDEN_RATIO = (1 + 5**0.5) / 2
LEAST_MEANS = [1 / math.expm1(-math.log(GOLDEN_RATIO - 1) / 2 ** (k - 1)) for k in range(1, 30)]
r"""The least mean of the gaps from which the parameter is 1, 2, ... (Kiely, 2004).

.. math:: k = \max\Big(0, 1 + \Big\lfloor \log_2 \frac{\ln(\varphi - 1)}
          {\ln(\mu / (\mu + 1))} \Big\rfloor\Big), \qquad \varphi = \frac{1 + \sqrt 5}{2}

is the best parameter for geometric gaps of mean :math:`\mu`.
"""


def _parameter(gaps: jax.Array, count: jax.Array) -> jax.Array:
    """The best parameter for `count` gaps with the sum `gaps`, of int32[rows]: 0 to 29."""
    # One product and one comparison each, so that compiled and other programs agree.
    total, number = gaps.astype(jnp.float32), count.astype(jnp.float32)
    reached = [(total >= mean * number).astype(jnp.int32) for mean in LEAST_MEANS]
    return sum(reached[1:], reached[0])


def _rice(gaps: jax.Array, parameter: jax.Array, width: int) -> _rows.BitFields:
    """The code of int32 gaps: `gap >> k` zeros, a one, and the `k` lowest bits of the gap.

    From 16 zeros on, it is 16 zeros, a one, and the gap in `width` bits.
    """
    quotient = gaps >> parameter
    is_long = quotient >= MOST_ZEROS
    kept = jnp.where(is_long, width, parameter)
    rest = gaps.astype(jnp.uint32) & _rows.low_bits(kept)
    return _rows.BitFields(jnp.minimum(quotient, MOST_ZEROS), (rest << 1) | 1, kept + 1)


def _read_rice(
    low: jax.Array, high: jax.Array, parameter: jax.Array, width: int
) -> tuple[jax.Array, jax.Array]:
    """The gap at the start of the bits and the number of its bits, int32 each."""
    zeros, rest = after_zeros(low, high)
    is_long = zeros >= MOST_ZEROS
    kept = jnp.where(is_long, width, parameter)
    value = ((rest >> 1) & _rows.low_bits(kept)).astype(jnp.int32)
    gap = jnp.where(is_long, value, (zeros << parameter) | value)
    return gap, zeros + 1 + kept


def _level(rows: jax.Array, alphabet: Alphabet) -> _rows.BitFields:
    """The code of a level that is not 0: a sign, after its magnitude unless that is always 1."""
    code = gamma(jnp.maximum(jnp.abs(rows), 1).astype(jnp.uint32))
    if max(-alphabet.low, alphabet.high) == 1:
        code = jax.tree.map(jnp.zeros_like, code)
    return signed(code, rows < 0)


def _gaps_before(here: jax.Array) -> jax.Array:
    """The zeros before each coordinate since the last one that is sent, int32[n + 1, rows].

    The last gap reaches the end of the row, so that reading needs no count.
    """

    def count(zeros: jax.Array, here: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.where(here, 0, zeros + 1), zeros

    first = _axis.varying_like(jnp.zeros(here.shape[1], jnp.int32), here)
    last, gaps = lax.scan(count, first, here)
    return jnp.concatenate([gaps, last[None]])


def _joined(first: _rows.BitFields, then: _rows.BitFields) -> _rows.BitFields:
    """The first code and the one after it as one, of at most 32 bits after its zeros."""
    before = first.width + then.zeros
    bits = first.bits | (then.bits << before.astype(jnp.uint32))
    return _rows.BitFields(first.zeros, bits, before + then.width)


def _write_levels(rows: jax.Array, alphabet: Alphabet) -> Any:
    n, number = rows.shape
    here = rows != 0
    ones = jnp.sum(here, axis=0, dtype=jnp.int32)
    parameter = _parameter(n - ones, ones + 1)
    gaps = _rice(_gaps_before(here), parameter[None], n.bit_length())
    sent = jnp.concatenate([here, jnp.ones((1, number), bool)])
    gaps = _rows.BitFields(*(jnp.where(sent, x, 0) for x in gaps))
    levels = _rows.BitFields(*(jnp.where(here, x, 0) for x in _level(rows, alphabet)))
    before = _rows.BitFields(*(x[:n] for x in gaps))
    # Writing takes as long as there are fields, also of no bits.
    in_one = max(-alphabet.low, alphabet.high) <= MOST_IN_ONE_FIELD
    turns = [_joined(before, levels)] if in_one else [before, levels]

    def in_turn(gaps: jax.Array, *turns: jax.Array) -> jax.Array:
        fields = jnp.stack(turns, axis=1).reshape(len(turns) * n, number)
        return jnp.concatenate([fields, gaps[n:]])

    return _rows.or_plain(_rows.BitFields(*map(in_turn, gaps, *turns)), parameter, rows, alphabet)


def _read_levels(stream: _rows.Stream, n: int, alphabet: Alphabet) -> jax.Array:
    is_plain = stream.parameter >= _rows.CONSTANT
    k, width = jnp.where(is_plain, 0, stream.parameter), n.bit_length()

    def step(zeros: jax.Array, bit: jax.Array, low: jax.Array, high: jax.Array) -> Any:
        """`zeros` counts the coordinates until the next one that is not 0."""
        if max(-alphabet.low, alphabet.high) > 1:
            magnitude, used, negative = read_gamma(low, high)
            used = used + 1
        else:
            magnitude, used, negative = jnp.int32(1), jnp.ones(low.shape, jnp.int32), low & 1
        level = jnp.where(negative == 1, -magnitude, magnitude)
        gap, more = _read_rice(*_rows.bits_at(stream, bit + used), k, width)
        here = zeros == 0
        after = jnp.where(here, gap, zeros - 1)
        return after, jnp.where(here, used + more, 0), jnp.where(here, level, 0)

    start = _rows.bits_at(stream, jnp.zeros(len(stream.starts), jnp.int32))
    gap, used = _read_rice(*start, k, width)
    return _rows.read(step, stream, n, alphabet, (jnp.where(is_plain, 0, used), gap))


def _write_gaps(rows: jax.Array, alphabet: Alphabet) -> Any:
    # The sum of distinct indices' gaps is below their range, so it is an int32.
    count = jnp.full(rows.shape[1], len(rows), jnp.int32)
    parameter = _parameter(jnp.sum(rows, axis=0, dtype=jnp.int32), count)
    return _rows.or_plain(_rice(rows, parameter[None], alphabet.width), parameter, rows, alphabet)


def _read_gaps(stream: _rows.Stream, n: int, alphabet: Alphabet) -> jax.Array:
    k = jnp.where(stream.parameter >= _rows.CONSTANT, 0, stream.parameter)

    def step(state: tuple[()], bit: jax.Array, low: jax.Array, high: jax.Array) -> Any:
        gap, used = _read_rice(low, high, k, alphabet.width)
        return state, used, gap

    return _rows.read(step, stream, n, alphabet)


def _bits_of_gaps(density: float) -> tuple[float, float]:
    """Of `q + 1 + k`, with P(q >= i) = (1 - p)^(2^k i)."""
    k = bisect.bisect_right(LEAST_MEANS, (1 - density) / density)
    again = (1 - density) ** 2**k
    return again / (1 - again) + 1 + k, again / (1 - again) ** 2


def _bits_of_levels(probabilities: np.ndarray) -> tuple[float, float]:
    """Of a coordinate: with the probability that it is not 0, a gap and a level."""
    zero = (len(probabilities) - 1) // 2
    density = 1 - float(probabilities[zero])
    if density <= 0:
        return 0.0, 0.0
    magnitudes = np.abs(np.arange(len(probabilities)) - zero)
    of_level = 2 * np.floor(np.log2(np.maximum(magnitudes, 1))) + 2
    if len(probabilities) <= 3:
        of_level = np.ones(len(probabilities))
    level, spread = moments(np.where(magnitudes > 0, probabilities, 0) / density, of_level)
    gap, variance = _bits_of_gaps(density)
    each = gap + level
    return density * each, density * (variance + spread) + density * (1 - density) * each**2


CODES = {
    "levels": _rows.RowCode(_write_levels, _read_levels, _bits_of_levels),
    "indices": _rows.RowCode(_write_gaps, _read_gaps, _bits_of_gaps),
}


@checked
def golomb_rice(
    codec: Codec, *, capacity: AboveZero | None = None, overflow: Policy = "nan"
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

    Sends `capacity` bits per integer and 256 bytes, and 2 bytes per row, but no more than the plain
    form of a fixed width. All other arrays of the payload, and statistics, are those of `codec`.
    The capacity is sent whether it is used or not.

    Args:
      codec: A codec of integers without memory, as in :func:`elias`.
      capacity: Bits per integer, a Python float; of levels, per coordinate. As in :func:`elias`;
        indices are taken for independent positions.
      overflow: `"nan"` or `"drop"`, as in :func:`elias`.

    Returns:
      A codec with the claims of `codec`. `combine` is `None`: gather its payloads.

    Raises:
      ValueError: If an argument is out of range, or `codec` does not state its integers. When
        encoding, if `capacity` is None and the codec's typical integers are not known.

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
    are plain, and the capacity is fixed.
    """
    return _rows.variable_length(
        codec, CODES, name="golomb_rice", capacity=capacity, overflow=overflow
    )
