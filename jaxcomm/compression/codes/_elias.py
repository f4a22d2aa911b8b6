"""The Elias-gamma code of integers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm._contract import Codec
from jaxcomm.compression._integers import Alphabet
from jaxcomm.compression._overflow import Policy
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
)
from jaxcomm.compression.codes._variable_length import variable_length

MOST = 1024
LARGEST = 2**30 - 1


class Gamma(NamedTuple):
    """The gamma code of positive integers, as the parts of a bit field."""

    zeros: jax.Array
    bits: jax.Array
    width: jax.Array


def gamma(positive: jax.Array) -> Gamma:
    r"""The code of uint32 from 1 to 2**31: `n` zeros, a one, and its `n` lowest bits.

    .. math:: n = \lfloor \log_2 m \rfloor
    """
    n = 31 - lax.clz(positive).astype(jnp.int32)
    rest = positive & low_bits(n)
    return Gamma(n, (rest << 1) | 1, n + 1)


def signed(code: Gamma, negative: jax.Array) -> Gamma:
    """The code with a bit for the sign after it."""
    sign = negative.astype(jnp.uint32) << code.width.astype(jnp.uint32)
    return Gamma(code.zeros, code.bits | sign, code.width + 1)


def positive_of(zeros: jax.Array, rest: jax.Array) -> jax.Array:
    """The positive integer of a gamma code, int32."""
    one = jnp.int32(1) << zeros
    return one | ((rest >> 1) & low_bits(zeros)).astype(jnp.int32)


def require_magnitudes(alphabet: Alphabet) -> None:
    """Raises if an integer plus 1 exceeds 30 bits."""
    largest = max(-alphabet.low, alphabet.high)
    if largest > LARGEST:
        raise ValueError(
            f"The Elias and Golomb-Rice codes have words for integers up to {LARGEST} in "
            f"magnitude, but the codec's may be {largest}."
        )


def any_gap(alphabet: Alphabet) -> None:
    """Accepts all alphabets: a gap plus 1 is at most 2**31, which has a word without a sign."""


def _write_levels(rows: jax.Array, alphabet: Alphabet) -> Written:
    code = gamma((jnp.abs(rows) + 1).astype(jnp.uint32))
    with_sign = signed(code, rows < 0)
    fields = [jnp.where(rows == 0, x, y) for x, y in zip(code, with_sign, strict=True)]
    return or_plain(BitFields(*fields), jnp.zeros(rows.shape[1], jnp.int32), rows, alphabet)


def _write_gaps(rows: jax.Array, alphabet: Alphabet) -> Written:
    fields = BitFields(*gamma((rows + 1).astype(jnp.uint32)))
    return or_plain(fields, jnp.zeros(rows.shape[1], jnp.int32), rows, alphabet)


def _reader(has_signs: bool) -> Callable[[Stream, int, Alphabet], jax.Array]:
    def read(stream: Stream, n: int, alphabet: Alphabet) -> jax.Array:
        is_plain, of_plain = stream.parameter >= CONSTANT, plain_bits(stream, alphabet)

        def step(bit: jax.Array, bits_at: Any) -> tuple[jax.Array, jax.Array]:
            low, high = bits_at(bit)
            zeros, rest = after_zeros(low, high)
            magnitude = positive_of(zeros, rest) - 1
            used, integer = 2 * zeros + 1, magnitude
            if has_signs:
                sign = (rest >> (zeros + 1).astype(jnp.uint32)) & 1
                integer = jnp.where(sign == 1, -magnitude, magnitude)
                integer = jnp.where(magnitude > 0, integer, 0)
                used = used + (magnitude > 0).astype(jnp.int32)
            integer = jnp.where(is_plain, read_plain(low, alphabet), integer)
            return bit + jnp.where(is_plain, of_plain, used), integer

        return read_rows(step, jnp.zeros(len(stream.starts), jnp.int32), stream, n)

    return read


def _bits_of_levels(probabilities: np.ndarray) -> Length:
    """The mean and variance of `2 floor(log2(|c| + 1)) + 1 + [c != 0]`; 0 is in the middle."""
    magnitudes = np.abs(np.arange(len(probabilities)) - (len(probabilities) - 1) // 2)
    bits = 2 * np.floor(np.log2(magnitudes + 1)) + 1 + (magnitudes > 0)
    mean = float(probabilities @ bits)
    return Length(mean, float(probabilities @ np.square(bits)) - mean**2)


def _bits_of_gaps(density: float) -> Length:
    """The mean and variance of `2 n + 1` of geometric gaps, with P(n >= i) = (1 - p)^(2^i - 1)."""
    i = np.arange(1, 32)
    at_least = (1 - density) ** (2.0**i - 1)
    n, squares = float(at_least.sum()), float((2 * i - 1) @ at_least)
    return Length(2 * n + 1, 4 * (squares - n**2))


LEVELS = RowCode(
    MOST, require_magnitudes, _write_levels, _reader(True), plain_words, _bits_of_levels
)
GAPS = RowCode(MOST, any_gap, _write_gaps, _reader(False), plain_words, _bits_of_gaps)


def elias(
    codec: Codec,
    *,
    room: float | None = None,
    overflow: Policy = "nan",
) -> Codec:
    r"""Sends the integers of `codec` in the Elias-gamma code, without loss.

    .. math:: \ell(c) = 2 \lfloor \log_2 (|c| + 1) \rfloor + 1 + [c \ne 0]

    bits for a level :math:`c`: as many zeros as :math:`|c| + 1` has bits after its first, these
    bits, and a sign unless it is 0. A gap :math:`g` between indices has :math:`2 \lfloor \log_2 (g
    + 1) \rfloor + 1` bits. Receivers decode exactly what they would decode of `codec`.

    Sends `room` bits per integer and 256 bytes, and 2 bytes per row of up to 1,024 integers, but no
    more than the plain form of a fixed width. All other arrays of the payload, and statistics, are
    those of `codec`. The room is sent whether it is used or not.

    Args:
      codec: A codec of integers without memory: :func:`~jaxcomm.compression.quantizers.dither`,
        :func:`~jaxcomm.compression.quantizers.min_max_dither`,
        :func:`~jaxcomm.compression.quantizers.ternary`, also `blockwise`, and
        :func:`~jaxcomm.compression.sparsifiers.top_k` and
        :func:`~jaxcomm.compression.sparsifiers.stc`, whose integers are gaps between indices.
      room: Bits per integer, a Python float. :func:`measured_room` returns those of given updates.
        Default: a unit of normal, independent coordinates fits with a probability of 0.999.
        Gradients have heavier tails and shorter codes; equal magnitudes have longer ones.
      overflow: If the words exceed the room: `"nan"` makes the update NaN on all workers; `"drop"`
        sends as many consecutive integers as fit, plain, from a random one on. Feedback uses the
        latter and keeps the rest. `diagnostics=True` reports the number dropped as `overflow`.

    Returns:
      A codec with the claims of `codec`. `combine` is `None`: gather its payloads.

    Raises:
      ValueError: If an argument is out of range, or `codec` does not state its integers. When
        encoding, if `room` is None and the codec's typical integers are not known.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.codes import elias
      >>> from jaxcomm.compression.quantizers import dither
      >>> codec, x = elias(dither(levels=7)), jax.random.normal(jax.random.key(0), (20_000,))
      >>> context = Context.of(x, memory=codec.init(x))
      >>> context = context.replace(statistics=codec.measure(context, x))
      >>> payload, _ = codec.encode(context, x)
      >>> payload.words.size < 20_000 * 4 / 32  # `dither` has 4 bits per coordinate.
      True

    References:
      Alistarh et al., `QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding
      <https://arxiv.org/abs/1610.02132>`_, 2017.

    Differs from the paper: Elias-gamma, not the recursive code; all coordinates have a code, as in
    the paper's code for many levels. Rows may be plain, and the room is fixed.
    """
    return variable_length(
        codec,
        {"levels": LEVELS, "indices": GAPS},
        name="elias",
        room=room,
        overflow=overflow,
    )
