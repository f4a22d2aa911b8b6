"""The definition of `pack` and `unpack`, in plain JAX.

The layout is planar. For `w` words with `l = 32 // bits` fields each, field `f` of word `i` is
element `f w + i` of the array. Therefore packing shifts and sums whole planes.
"""

import math

import jax
import jax.numpy as jnp


def lanes(bits: int) -> int:
    """Fields in a word of 32 bits."""
    return 32 // bits


def words(size: int, bits: int) -> int:
    """The number of words that hold `size` fields."""
    return -(-size // lanes(bits))


def _shifts(bits: int) -> jax.Array:
    return jnp.arange(lanes(bits), dtype=jnp.uint32)[:, None] * jnp.uint32(bits)


def pack(numbers: jax.Array, *, bits: int) -> jax.Array:
    """Packs bool, uint8 or uint32 of any shape, each below `2**bits`, into uint32[words]."""
    fill = words(numbers.size, bits) * lanes(bits) - numbers.size
    planes = jnp.pad(numbers.ravel(), (0, fill)).reshape(lanes(bits), -1)
    return jnp.sum(planes.astype(jnp.uint32) << _shifts(bits), axis=0, dtype=jnp.uint32)


def unpack(packed: jax.Array, *, bits: int, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `pack`: uint32 of `shape`."""
    fields = (packed[None] >> _shifts(bits)) & jnp.uint32(2**bits - 1)
    return fields.ravel()[: math.prod(shape)].reshape(shape)
