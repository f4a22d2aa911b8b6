"""rANS of levels, with counts that the sender measures and sends."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import Codec
from jaxcomm._require import AboveZero, checked
from jaxcomm.compression import _bits
from jaxcomm.compression._bits import Alphabet
from jaxcomm.compression._overflow import Policy
from jaxcomm.compression.codes import _rows
from jaxcomm.compression.codes._elias import moments

PRECISION = 14
TOTAL = 2**PRECISION
LEAST_STATE = 2**16
COST_UNIT = 2**6
"""Costs of levels are integers in units of a 64th of a bit, so that they add up exactly."""


def _fractions(counts: jax.Array, whole: int) -> jax.Array:
    """`floor(2**14 counts / whole)`, int32, of uint32 counts of at most `whole`, bit by bit.

    The product does not fit in 32 bits, and floats would round it in compiled programs only.
    """
    divisor = jnp.uint32(whole)
    quotient = (counts >= divisor).astype(jnp.uint32)
    rest = counts - quotient * divisor
    for _ in range(PRECISION):
        rest = rest << 1
        bit = (rest >= divisor).astype(jnp.uint32)
        quotient, rest = (quotient << 1) | bit, rest - bit * divisor
    return quotient.astype(jnp.int32)


def _scaled_counts(levels: jax.Array, number: int) -> jax.Array:
    r"""How often each of `number` levels occurs, int32, scaled to a sum of exactly 2**14.

    .. math:: f_s = [h_s > 0] + \Big\lfloor \frac{M - K}{M} \Big\lfloor \frac{h_s M}{m}
              \Big\rfloor \Big\rfloor, \qquad M = 2^{14}

    for :math:`m` numbers with :math:`K` different ones; the most frequent one gets the rest. So no
    level that occurs has the count 0.
    """
    counts = jnp.zeros(number, jnp.int32).at[levels.ravel()].add(1)
    occurs = (counts > 0).astype(jnp.int32)
    free = TOTAL - jnp.sum(occurs, dtype=jnp.int32)
    share = (_fractions(counts.astype(jnp.uint32), levels.size) * free) >> PRECISION
    scaled = occurs + share
    return scaled.at[jnp.argmax(counts)].add(TOTAL - jnp.sum(scaled, dtype=jnp.int32))


def _write(rows: jax.Array, alphabet: Alphabet) -> Any:
    levels, number = rows - alphabet.low, alphabet.high - alphabet.low + 1
    count = _scaled_counts(levels, number)
    first = jnp.cumsum(count, dtype=jnp.int32) - count
    cost = jnp.log2(TOTAL / jnp.maximum(count, 1).astype(jnp.float32)) * COST_UNIT
    own_cost = jnp.ceil(cost).astype(jnp.int32)[levels]
    plain_cost = len(rows) * alphabet.width * COST_UNIT
    is_plain = jnp.sum(own_cost, axis=0, dtype=jnp.int32) >= plain_cost
    # Equal counts of all numbers of the width are the plain form.
    shift = PRECISION - alphabet.width
    frequency = jnp.where(is_plain[None], 1 << shift, count[levels]).astype(jnp.uint32)
    start = jnp.where(is_plain[None], levels << shift, first[levels]).astype(jnp.uint32)

    def push(state: jax.Array, level: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Any]:
        frequency, start = level
        emits = (state >> (32 - PRECISION)) >= frequency
        low = state & jnp.uint32(0xFFFF)
        state = jnp.where(emits, state >> 16, state)
        quotient = state // frequency
        state = (quotient << PRECISION) + (state - quotient * frequency) + start
        return state, (emits, low)

    least = _axis.varying_like(jnp.full(rows.shape[1], LEAST_STATE, jnp.uint32), rows)
    # The last level is pushed first: reading pops them in order.
    state, (emits, low) = lax.scan(push, least, (frequency, start), reverse=True)
    width = jnp.where(emits, jnp.int32(16), 0)
    width = jnp.concatenate([jnp.full((1, rows.shape[1]), 32, jnp.int32), width])
    bits = jnp.concatenate([state[None], jnp.where(emits, low, 0)])
    table = _bits.pack_numbers(count.astype(jnp.uint32), 16)
    return (
        _rows.BitFields(jnp.zeros_like(width), bits, width),
        jnp.where(is_plain, _rows.PLAIN, 0),
        table,
    )


def _read(stream: _rows.Stream, n: int, alphabet: Alphabet) -> jax.Array:
    number = alphabet.high - alphabet.low + 1
    count = _bits.unpack_numbers(stream.table, 16, number).astype(jnp.int32)
    first = jnp.cumsum(count, dtype=jnp.int32) - count
    slots = lax.iota(jnp.int32, TOTAL)
    level_at = jnp.searchsorted(first + count, slots, side="right", method="scan")
    level_at = jnp.minimum(level_at, number - 1).astype(jnp.int32)
    is_plain, shift = stream.parameter == _rows.PLAIN, PRECISION - alphabet.width

    def pop(carry: tuple[jax.Array, jax.Array], _: Any) -> tuple[Any, jax.Array]:
        state, bit = carry  # The state is at least 2**16.
        slot = (state & jnp.uint32(TOTAL - 1)).astype(jnp.int32)
        level = jnp.where(is_plain, slot >> shift, level_at[slot])
        level = jnp.minimum(level, number - 1)  # Words that are cut off may have any numbers.
        frequency = jnp.where(is_plain, 1 << shift, count[level])
        start = jnp.where(is_plain, level << shift, first[level])
        state = frequency.astype(jnp.uint32) * (state >> PRECISION)
        state = state + (slot - start).astype(jnp.uint32)
        refills = state < LEAST_STATE
        low, _ = _rows.bits_at(stream, bit)
        state = jnp.where(refills, (state << 16) | (low & jnp.uint32(0xFFFF)), state)
        return (state, bit + jnp.where(refills, jnp.int32(16), 0)), level + alphabet.low

    begin = stream.words.at[stream.starts].get(mode="clip")
    bit = jnp.full(len(stream.starts), 32, jnp.int32)
    carry = jax.tree.map(lambda x: _axis.varying_like(x, stream), (begin, bit))
    return lax.scan(pop, carry, None, length=n)[1]


def _bits_of_levels(probabilities: np.ndarray) -> tuple[float, float]:
    """The entropy, and the variance of `-log2 p`."""
    occurring = probabilities[probabilities > 0]
    mean, variance = moments(occurring, -np.log2(occurring))
    # Counts that are rounded, at least 1 of 2**14 for each level.
    return mean + math.log2(TOTAL / (TOTAL - len(probabilities))) + 2.0**-10, variance


CODES = {"levels": _rows.RowCode(_write, _read, _bits_of_levels, most=2048, levels=2048, state=32)}


@checked
def rans(codec: Codec, *, capacity: AboveZero | None = None, overflow: Policy = "nan") -> Codec:
    r"""Sends the levels of `codec` in close to their entropy, by rANS, without loss.

    .. math:: \ell(c) \approx \log_2 \frac{m}{h_c}

    bits for a level :math:`c` that occurs :math:`h_c` times among the :math:`m` levels of a unit.
    Workers agree on the counts, since each sends them with its payload, 2 bytes per level.

    Sends `capacity` bits per integer and 256 bytes, 2 bytes per possible level, and 2 bytes per row
    of up to 2,048 integers. A row costs 2 bytes and, on average, 4 more bytes beyond its entropy,
    so this code is within 3 % of the entropy if that is more than 0.8 bits per integer. All other
    arrays of the payload, and statistics, are those of `codec`. The capacity is sent whether it is
    used or not.

    Args:
      codec: A codec of integers without memory, as in :func:`elias`, of at most 2,048 levels; not
        one that sends indices.
      capacity: Bits per integer, a Python float. As in :func:`elias`.
      overflow: `"nan"` or `"drop"`, as in :func:`elias`.

    Returns:
      A codec with the claims of `codec`. `combine` is `None`: gather its payloads.

    Raises:
      ValueError: If an argument is out of range, or `codec` does not state its integers, or sends
        indices. When encoding, if the codec has more levels, or `capacity` is None and the codec's
        typical integers are not known.

    Example:
      >>> import jax
      >>> from jaxcomm.compression.codes import measured_capacity, rans
      >>> from jaxcomm.compression.quantizers import min_max_dither
      >>> updates = jax.random.normal(jax.random.key(0), (4, 20_000))
      >>> capacity = measured_capacity(rans(min_max_dither(levels=16)), updates)
      >>> 2.5 < capacity < 3.3  # `min_max_dither` has 4 bits per coordinate.
      True

    References:
      Suresh et al., `Distributed Mean Estimation with Limited Communication
      <https://arxiv.org/abs/1611.00429>`_, 2017 (variable-length coding).
      Duda, `Asymmetric Numeral Systems <https://arxiv.org/abs/1311.2540>`_, 2013.

    Differs from the paper: rANS in place of arithmetic coding; counts have 14 bits; rows that
    this would not shorten are plain; and the capacity is fixed.
    """
    return _rows.variable_length(codec, CODES, name="rans", capacity=capacity, overflow=overflow)
