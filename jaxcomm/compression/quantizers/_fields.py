r"""Integer fields whose sum over workers cannot overflow.

Codes :math:`c_i \in [-s, s]` of :math:`n` workers add up to at most :math:`n s` in magnitude. 8
bits travel as int8 and need :math:`n s \le 127`. 16 bits travel biased, two non-negative fields
:math:`c_i + s` in a uint32 word, and need :math:`2 n s < 2^{16}`, so that no field carries into its
neighbour; int16 is no choice, since XLA widens its all-reduce on GPU. 32 bits travel as int32.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

WIDTHS = (8, 16, 32)

# float32 has 24 bits of mantissa: codes beyond this would not be exact.
MOST_LEVELS = 2**24 - 1


class Field(NamedTuple):
    """How codes of one unit travel."""

    levels: int  # s, each worker's codes are in [-s, s]
    width: int  # bits of a code on the wire


def most_levels(width: int, workers: int) -> int:
    """The largest `s` whose sum over `workers` fits in `width` bits; 0 when there is none."""
    return min((2 ** (width - 1) - 1) // workers, MOST_LEVELS)


def choose_field(levels: int | None, bits: int | None, workers: int) -> Field:
    """Completes `levels` and `bits` such that the sum of `workers` codes cannot overflow.

    Raises:
      ValueError: If it would, with the smallest width that works.
    """
    needed = levels or 1
    fitting = [width for width in WIDTHS if most_levels(width, workers) >= needed]
    if not fitting:
        raise ValueError(
            f"No field of {WIDTHS} bits holds the sum of {needed} levels over {workers} workers: "
            f"at most {most_levels(WIDTHS[-1], workers)} levels fit."
        )
    width = fitting[0] if bits is None else bits
    if width not in fitting:
        raise ValueError(
            f"`bits`={bits} cannot hold the sum of {needed} levels over {workers} workers: the "
            f"smallest width that works is {fitting[0]} bits."
        )
    return Field(levels or most_levels(width, workers), width)


def pack(codes: jax.Array, field: Field) -> jax.Array:
    """Codes in [-s, s] as what travels: int8[shape], uint32[ceil(size / 2)] or int32[shape].

    Args:
      codes: int32 of any shape.
      field: The field.
    """
    if field.width == 8:
        return codes.astype(jnp.int8)
    if field.width == 32:
        return codes
    lanes = 32 // field.width
    biased = (codes.ravel() + field.levels).astype(jnp.uint32)
    biased = jnp.pad(biased, (0, -biased.size % lanes)).reshape(lanes, -1)
    shifts = jnp.arange(lanes, dtype=jnp.uint32)[:, None] * jnp.uint32(field.width)
    return jnp.sum(biased << shifts, axis=0, dtype=jnp.uint32)


def unpack(words: jax.Array, field: Field, count: int, shape: tuple[int, ...]) -> jax.Array:
    """The sums of `count` codes, int32[shape], from the sum of `count` packed arrays."""
    if field.width == 8:
        return words.astype(jnp.int32)
    if field.width == 32:
        return words
    lanes = 32 // field.width
    shifts = jnp.arange(lanes, dtype=jnp.uint32)[:, None] * jnp.uint32(field.width)
    mask = jnp.uint32(2**field.width - 1)
    biased = lax.convert_element_type((words[None] >> shifts) & mask, jnp.int32)
    size = math.prod(shape)
    return biased.ravel()[:size].reshape(shape) - count * field.levels
