"""Arrays as planes, as fields travel in words: field f of word i is element i of plane f.

Each plane is padded to a pitch that a kernel's blocks divide. Where nothing is to be padded this is
free; else it is a pass over the array before the kernel, and one after it.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.pack.reference import lanes, words

DTYPES = {8: jnp.int8, 32: jnp.int32}  # Of the widths that travel unpacked and unbiased.


def layout(size: int, bits: int) -> tuple[int, int]:
    """How many planes `size` elements make, and how many elements each has."""
    return (1, size) if bits in DTYPES else (lanes(bits), words(size, bits))


def to_planes(x: jax.Array, count: int, width: int, pitch: int) -> jax.Array:
    """`x` of any shape as [count * pitch], filled with zeros."""
    flat = x.ravel()
    if pitch == width:
        return jnp.pad(flat, (0, count * width - x.size))
    # Slices of one axis, because XLA moves the array several times to pad [count, width] on a TPU.
    planes = (flat[plane * width : (plane + 1) * width] for plane in range(count))
    return jnp.concatenate([jnp.pad(plane, (0, pitch - plane.size)) for plane in planes])


def from_planes(planes: jax.Array, width: int, pitch: int, shape: tuple[int, ...]) -> jax.Array:
    """The array of `shape` again."""
    flat = planes.ravel()
    if pitch != width:
        starts = range(0, planes.size, pitch)
        flat = jnp.concatenate([flat[start : start + width] for start in starts])
    return flat[: math.prod(shape)].reshape(shape)
