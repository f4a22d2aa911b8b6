"""Bits packed in words, and the largest arrays whose coordinates can be counted.

The layout is planar: with `w` words, bit j of word i is bit `j w + i` of the array, so packing
shifts and ORs whole planes.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.pack import pack, unpack

WORD = 32


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
    planes = jnp.arange(width, dtype=jnp.uint32)[:, None]
    return pack_bits(((numbers[None] >> planes) & jnp.uint32(1)).ravel() == 1)


def unpack_numbers(packed: jax.Array, width: int, count: int) -> jax.Array:
    """The inverse of `pack_numbers`: uint32[count]."""
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
        raise ValueError(
            f"A bucket or leaf has {size} coordinates, but this codec supports at most {most}: "
            "split the leaf."
        )
    return size
