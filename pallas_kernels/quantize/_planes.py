"""Arrays as planes, the layout of fields in words: field f of word i is element i of plane f.

Each plane is padded to a pitch that a kernel's blocks divide. This is free if no padding is needed.
Otherwise it costs a pass over the array before the kernel, and one after it.
"""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.pack.reference import lanes, words

DTYPES = {8: jnp.int8, 32: jnp.int32}  # The widths that are neither packed nor offset.


def layout(size: int, bits: int) -> tuple[int, int]:
    """The number of planes that `size` elements need, and the number of elements of each."""
    return (1, size) if bits in DTYPES else (lanes(bits), words(size, bits))


def to_planes(x: jax.Array, count: int, width: int, pitch: int) -> jax.Array:
    """`x` of any shape as [count * pitch], padded with zeros."""
    flat = x.ravel()
    if pitch == width:
        return jnp.pad(flat, (0, count * width - x.size))
    # One-dimensional slices: to pad [count, width] on a TPU, XLA moves the array several times.
    planes = (flat[plane * width : (plane + 1) * width] for plane in range(count))
    return jnp.concatenate([jnp.pad(plane, (0, pitch - plane.size)) for plane in planes])


def from_planes(planes: jax.Array, width: int, pitch: int, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `to_planes`: an array of `shape`."""
    flat = planes.ravel()
    if pitch != width:
        starts = range(0, planes.size, pitch)
        flat = jnp.concatenate([flat[start : start + width] for start in starts])
    return flat[: math.prod(shape)].reshape(shape)
