r"""Random bits as a hash of a position: the same numbers on every backend and in every kernel.

.. math:: b_j = m((2 k_0 + 1)\, j + k_1) \bmod 2^{32}

for two seeds :math:`k_0, k_1` and a mixing bijection :math:`m` of 32-bit words. The hash uses only
shifts, xors, additions and multiplications of uint32. Therefore a kernel computes from the
positions of its block bit for bit what the reference computes from all positions.

The factor is odd, so no word occurs twice in an array. The seeds separate arrays: different first
seeds give different strides through the words, and different second seeds give distant starts.
(The highest bit of :math:`k_0` has no effect.)
"""

import math

import jax
import jax.numpy as jnp
from jax import lax


def mix(h: jax.Array) -> jax.Array:
    """A bijection of uint32 with low bias: xor-shift-multiply rounds (Wellons' lowbias32)."""
    h = mix_upper(h)
    return h ^ (h >> 16)


def mix_upper(h: jax.Array) -> jax.Array:
    """The upper 16 bits of `mix`, above others that are less mixed."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    return (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)


def stride(first_seed: jax.Array) -> jax.Array:
    """By how much the words that are mixed differ from one position to the next, uint32[]."""
    return 2 * first_seed + 1


def bits(position: jax.Array, first_seed: jax.Array, second_seed: jax.Array) -> jax.Array:
    """uint32 random bits for each `position`, uint32 of any shape; seeds are uint32[]."""
    return mix(position * stride(first_seed) + second_seed)


def positions(shape: tuple[int, ...]) -> jax.Array:
    """The position of each element in the flat array, uint32 of this shape.

    Raises:
      ValueError: If `shape` has 2**32 elements or more: the counter would wrap.
    """
    if math.prod(shape) >= 2**32:
        raise ValueError(f"`shape`={shape} has 2**32 elements or more: split the leaf.")
    stride = 1
    position = jnp.zeros(shape, jnp.uint32)
    for axis in reversed(range(len(shape))):
        position += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
        stride *= shape[axis]
    return position
