"""`pack` and `unpack` as Mosaic GPU kernels, for Hopper and newer: one pass over memory.

Each field of the words is a plane of rows, and a block of 128 threads processes one row of every
plane. Sizes that do not fill their rows are padded, which costs an extra pass.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _vma
from pallas_kernels._configs import PerThread
from pallas_kernels._gpu import gpu_kernel, require_int32
from pallas_kernels.pack.reference import lanes, words


@dataclasses.dataclass(frozen=True)
class Config(PerThread):
    """A thread has `numbers` words of a row."""

    numbers: int = 4


def _pack_kernel(planes_ref: Any, out_ref: Any, *, bits: int) -> None:
    row = lax.axis_index("row")
    word = planes_ref[0, row].astype(jnp.uint32)
    for plane in range(1, planes_ref.shape[0]):
        word = word + (planes_ref[plane, row].astype(jnp.uint32) << jnp.uint32(plane * bits))
    out_ref[row] = word


def pack(
    numbers: jax.Array, *, bits: int, config: Config | None = None, interpret: Any = False
) -> jax.Array:
    """See `reference.pack`."""
    require_int32(numbers.size)
    if numbers.size == 0:
        return numbers.ravel().astype(jnp.uint32)
    if numbers.dtype == jnp.bool:
        numbers = numbers.astype(jnp.uint8)
    block = (config or Config.of(numbers.dtype)).block
    planes, width = lanes(bits), words(numbers.size, bits)
    flat = jnp.pad(numbers.ravel(), (0, planes * width - numbers.size))
    padded = jnp.pad(flat.reshape(planes, width), ((0, 0), (0, -width % block)))
    operand = padded.reshape(planes, -1, block)
    rows = operand.shape[1]
    packed = gpu_kernel(
        functools.partial(_pack_kernel, bits=bits),
        out_type=_vma.like(operand, (rows, block), jnp.uint32),
        grid={"row": rows},
        interpret=interpret,
    )(operand)
    return packed.ravel()[:width]


def _unpack_kernel(packed_ref: Any, out_ref: Any, *, bits: int) -> None:
    row = lax.axis_index("row")
    word = packed_ref[row]
    for plane in range(out_ref.shape[0]):
        out_ref[plane, row] = (word >> jnp.uint32(plane * bits)) & jnp.uint32(2**bits - 1)


def unpack(
    packed: jax.Array,
    *,
    bits: int,
    shape: tuple[int, ...],
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `reference.unpack`."""
    require_int32(math.prod(shape))
    if packed.size == 0:
        return packed.reshape(shape)
    block = (config or Config.of(packed.dtype)).block
    planes, width = lanes(bits), packed.size
    operand = jnp.pad(packed, (0, -width % block)).reshape(-1, block)
    rows = operand.shape[0]
    fields = gpu_kernel(
        functools.partial(_unpack_kernel, bits=bits),
        out_type=_vma.like(operand, (planes, rows, block), jnp.uint32),
        grid={"row": rows},
        interpret=interpret,
    )(operand)
    flat = fields.reshape(planes, -1)[:, :width].ravel()
    return flat[: math.prod(shape)].reshape(shape)
