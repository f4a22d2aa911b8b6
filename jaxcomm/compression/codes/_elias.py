"""The Elias-gamma code of integers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm._contract import Codec
from jaxcomm._require import AboveZero, checked
from jaxcomm.compression._bits import Alphabet
from jaxcomm.compression._overflow import Policy
from jaxcomm.compression.codes import _rows


def gamma(positive: jax.Array) -> _rows.BitFields:
    r"""The code of uint32 from 1 to 2**31: `n` zeros, a one, and its `n` lowest bits.

    .. math:: n = \lfloor \log_2 m \rfloor
    """
    n = 31 - lax.clz(positive).astype(jnp.int32)
    rest = positive & _rows.low_bits(n)
    return _rows.BitFields(n, (rest << 1) | 1, n + 1)


def signed(code: _rows.BitFields, negative: jax.Array) -> _rows.BitFields:
    """The code with a bit for the sign after it."""
    sign = negative.astype(jnp.uint32) << code.width.astype(jnp.uint32)
    return _rows.BitFields(code.zeros, code.bits | sign, code.width + 1)


def after_zeros(low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The number of zeros at the start of 64 bits, int32, at most 31; and the 32 bits after them.

    A field has at most 31 zeros. Words that are cut off may have more, and any result.
    """
    zeros = lax.population_count((low & (~low + 1)) - 1)
    zeros = jnp.minimum(zeros, jnp.uint32(31))
    rest = (low >> zeros) | ((high << 1) << (31 - zeros))
    return zeros.astype(jnp.int32), rest


def read_gamma(low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The integer at the start of 64 bits and the number of its bits, int32, and the bit after."""
    zeros, rest = after_zeros(low, high)
    positive = (jnp.int32(1) << zeros) | ((rest >> 1) & _rows.low_bits(zeros)).astype(jnp.int32)
    return positive, 2 * zeros + 1, (rest >> (zeros + 1).astype(jnp.uint32)) & 1


def moments(probabilities: np.ndarray, bits: np.ndarray) -> tuple[float, float]:
    """The mean and the variance."""
    mean = float(probabilities @ bits)
    return mean, float(probabilities @ np.square(bits)) - mean**2


def _code(expected: Callable[[Any], tuple[float, float]], *, has_signs: bool) -> _rows.RowCode:
    def write(rows: jax.Array, alphabet: Alphabet) -> Any:
        code = gamma((jnp.abs(rows) + 1).astype(jnp.uint32))
        if has_signs:
            each = zip(code, signed(code, rows < 0), strict=True)
            code = _rows.BitFields(*(jnp.where(rows == 0, x, y) for x, y in each))
        return _rows.or_plain(code, jnp.zeros(rows.shape[1], jnp.int32), rows, alphabet)

    def step(state: tuple[()], bit: jax.Array, low: jax.Array, high: jax.Array) -> Any:
        positive, used, sign = read_gamma(low, high)
        integer = positive - 1
        if has_signs:
            used = used + (integer > 0).astype(jnp.int32)
            integer = jnp.where((sign == 1) & (integer > 0), -integer, integer)
        return state, used, integer

    return _rows.RowCode(write, functools.partial(_rows.read, step), expected)


def _bits_of_levels(probabilities: np.ndarray) -> tuple[float, float]:
    """Of `2 floor(log2(|c| + 1)) + 1 + [c != 0]`; 0 is in the middle."""
    magnitudes = np.abs(np.arange(len(probabilities)) - (len(probabilities) - 1) // 2)
    return moments(probabilities, 2 * np.floor(np.log2(magnitudes + 1)) + 1 + (magnitudes > 0))


def _bits_of_gaps(density: float) -> tuple[float, float]:
    """Of `2 n + 1` of geometric gaps, with P(n >= i) = (1 - p)^(2^i - 1)."""
    i = np.arange(1, 32)
    at_least = (1 - density) ** (2.0**i - 1)
    n, squares = float(at_least.sum()), float((2 * i - 1) @ at_least)
    return 2 * n + 1, 4 * (squares - n**2)


CODES = {
    "levels": _code(_bits_of_levels, has_signs=True),
    "indices": _code(_bits_of_gaps, has_signs=False),
}


@checked
def elias(codec: Codec, *, capacity: AboveZero | None = None, overflow: Policy = "nan") -> Codec:
    r"""Sends the integers of `codec` in the Elias-gamma code, without loss.

    .. math:: \ell(c) = 2 \lfloor \log_2 (|c| + 1) \rfloor + 1 + [c \ne 0]

    bits for a level :math:`c`: as many zeros as :math:`|c| + 1` has bits after its first, these
    bits, and a sign unless it is 0. A gap :math:`g` between indices has :math:`2 \lfloor \log_2 (g
    + 1) \rfloor + 1` bits. Receivers decode exactly what they would decode of `codec`.

    Sends `capacity` bits per integer and 256 bytes, and 2 bytes per row of up to 1,024 integers,
    but no more than the plain form of a fixed width. All other arrays of the payload, and
    statistics, are those of `codec`. The capacity is sent whether it is used or not.

    Args:
      codec: A codec of integers without memory: :func:`~jaxcomm.compression.quantizers.dither`,
        :func:`~jaxcomm.compression.quantizers.min_max_dither`,
        :func:`~jaxcomm.compression.quantizers.ternary`, also `blockwise`, and
        :func:`~jaxcomm.compression.sparsifiers.top_k` and
        :func:`~jaxcomm.compression.sparsifiers.stc`, whose integers are gaps between indices.
      capacity: Bits per integer, a Python float. :func:`measured_capacity` returns what given
        updates need. Default: a unit of normal, independent coordinates fits with a probability of
        0.999. Gradients have heavier tails and shorter codes; equal magnitudes have longer ones.
      overflow: If the words exceed the capacity: `"nan"` makes the update NaN on all workers;
        `"drop"` sends as many consecutive integers as fit, plain, from a random one on. Feedback
        uses the latter and keeps the rest. `diagnostics=True` reports the number dropped as
        `overflow`.

    Returns:
      A codec with the claims of `codec`. `combine` is `None`: gather its payloads.

    Raises:
      ValueError: If an argument is out of range, or `codec` does not state its integers. When
        encoding, if `capacity` is None and the codec's typical integers are not known.

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
    the paper's code for many levels. Rows may be plain, and the capacity is fixed.
    """
    return _rows.variable_length(codec, CODES, name="elias", capacity=capacity, overflow=overflow)
