r"""Integer fields whose sum over workers cannot overflow.

Codes :math:`c_i \in [-s, s]` of :math:`n` workers add up to at most :math:`n s` in magnitude. A
field of :math:`b` bits holds the sum if :math:`2 n s < 2^b`.

Codes of 8 bits are sent as int8, codes of 32 bits as int32. All other widths are sent with a bias:
a uint32 word holds as many non-negative fields :math:`c_i + s` as fit, so that no field carries
into its neighbor. Each coordinate takes :math:`32 / \lfloor 32 / b \rfloor` bits. Widths that do
not divide 32 evenly waste some bits: 7 and 9 cost as much as 8 and 10, and 11 to 15 as much as 16.
int16 is not used, since XLA widens its all-reduce on GPU.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.pack import pack as pack_fields
from pallas_kernels.pack import unpack as unpack_fields
from pallas_kernels.quantize.api import MOST_LEVELS as MOST_LEVELS
from pallas_kernels.quantize.api import WIDTHS as WIDTHS


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
    fitting = [width for width in WIDTHS if most_levels(width, workers) >= needed]
    if not fitting:
        raise ValueError(
            f"No field of 2 to 32 bits holds the sum of {needed} levels over {workers} workers: "
            f"at most {most_levels(WIDTHS[-1], workers)} levels fit."
        )
    cheapest = max(fitting, key=lambda width: (32 // width, width))
    width = cheapest if bits is None else bits
    if width not in fitting:
        raise ValueError(
            f"`bits`={bits} cannot hold the sum of {needed} levels over {workers} workers: the "
            f"smallest width that works is {fitting[0]} bits."
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
