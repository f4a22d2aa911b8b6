"""Integers and bits of a payload: packed in words, counted, and stated for other codes.

The layout is planar: with `w` words, bit j of word i is bit `j w + i` of the array, so packing
shifts and ORs whole planes. Widths that divide 32 are fields of a word, also planar.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._contract import Context, PyTree
from pallas_kernels.pack import pack, unpack

WORD = 32


class CodesPayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf), or a sum of such payloads over workers."""

    codes: jax.Array  # integers, one of each coordinate or packed in words


class ValuesPayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf), or a sum of such payloads over workers."""

    values: jax.Array  # float32


def words(bits: int) -> int:
    """The number of words that hold `bits` bits."""
    return -(-bits // WORD)


def pack_bits(bits: jax.Array) -> jax.Array:
    """Packs bool[m] into uint32[ceil(m / 32)], padded with zeros."""
    return pack(bits, bits=1)


def unpack_bits(packed: jax.Array, count: int) -> jax.Array:
    """Unpacks the first `count` bits of uint32[words] into bool[count]."""
    return unpack(packed, bits=1, shape=(count,)) == 1


def pack_numbers(numbers: jax.Array, width: int) -> jax.Array:
    """Packs uint32[k], each below `2**width`, into uint32[ceil(k width / 32)]."""
    if width and WORD % width == 0:
        return pack(numbers, bits=width)
    require_countable(numbers.size, (2**32 - 1) // max(width, 1))
    planes = jnp.arange(width, dtype=jnp.uint32)[:, None]
    return pack_bits(((numbers[None] >> planes) & jnp.uint32(1)).ravel() == 1)


def unpack_numbers(packed: jax.Array, width: int, count: int) -> jax.Array:
    """The inverse of `pack_numbers`: uint32[count]."""
    if width and WORD % width == 0:
        return unpack(packed, bits=width, shape=(count,))
    planes = unpack_bits(packed, width * count).reshape(width, count).astype(jnp.uint32)
    shifts = jnp.arange(width, dtype=jnp.uint32)[:, None]
    return jnp.sum(planes << shifts, axis=0, dtype=jnp.uint32)


MOST = 2**31 - 1


def require_countable(size: int, most: int = MOST) -> int:
    """Returns `size` if a codec with 32-bit positions can address that many coordinates.

    Raises:
      ValueError: If `size` exceeds `most`.
    """
    if size > most:
        raise ValueError(f"A unit has {size} coordinates, of at most {most}: split the leaf.")
    return size


MOST_LIKELY = 2**13
"""The largest number of levels of which a codec states the likely probabilities."""


class Alphabet(NamedTuple):
    """How many integers a payload has, and their range."""

    number: int
    low: int
    high: int

    @property
    def width(self) -> int:
        """The bits of an integer in a plain code of fixed width, at least 1."""
        return max((self.high - self.low).bit_length(), 1)


Likely: TypeAlias = Callable[[int], np.ndarray | float | None]


class Integers(NamedTuple):
    """The integers in the payloads of an `encode`.

    Attributes:
      kind: `"levels"`: one level for each coordinate, in order, then those of padding; 0 is the
        most frequent. `"indices"`: the distinct positions of the sent coordinates, ascending.
      alphabet: `context -> Alphabet`, static.
      split: `(context, payload) -> (int32[number], rest)`, the integers and all else that is sent.
      join: `(context, int32[number], rest) -> payload`, the inverse: the same payload, bit for bit.
      likely: `size -> p` if coordinates are normal and independent, for `size` coordinates that
        share statistics. Of levels: the probability of each, float64[high - low + 1]. Of indices:
        the fraction of the coordinates that are sent. `None` if it is not known.
      certain: Whether the `contraction` that the codec claims holds in every draw.
    """

    kind: Literal["levels", "indices"]
    alphabet: Callable[[Context], Alphabet]
    split: Callable[[Context, PyTree], tuple[jax.Array, PyTree]]
    join: Callable[[Context, jax.Array, PyTree], PyTree]
    likely: Likely = lambda size: None
    certain: bool = False


def _normal_excess(t: np.ndarray) -> np.ndarray:
    """The expectation of `max(y - t, 0)` for a standard normal `y`."""
    above = 0.5 * np.vectorize(math.erfc, otypes=[np.float64])(t / math.sqrt(2))
    excess: np.ndarray = np.exp(-np.square(t) / 2) / math.sqrt(2 * math.pi) - t * above
    return excess


def rounded_normal(low: int, high: int, spread: float, mean: float = 0.0) -> np.ndarray | None:
    r"""The probabilities of the levels to which normal numbers are rounded without bias.

    .. math:: P(c) = \mathbb{E} \max(1 - |y - c|, 0) = H(c - 1) - 2 H(c) + H(c + 1), \quad
              H(t) = \mathbb{E} \max(y - t, 0), \quad y \sim N(\mu, \sigma^2)

    Args:
      low: The least level.
      high: The largest level.
      spread: :math:`\sigma`, in levels.
      mean: :math:`\mu`, in levels.

    Returns:
      float64[high - low + 1], which add up to 1; `None` for more than 2**13 levels.
    """
    if high - low >= MOST_LIKELY:
        return None
    excess = spread * _normal_excess((np.arange(low - 1, high + 2) - mean) / spread)
    hats = np.maximum(excess[:-2] - 2 * excess[1:-1] + excess[2:], 0)
    probabilities: np.ndarray = hats / hats.sum()
    return probabilities
