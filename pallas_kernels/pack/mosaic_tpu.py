"""`pack` and `unpack` as Pallas kernels for TPU: one pass over memory.

Each field of the words is a plane of rows of 128 lanes. Sizes that do not fill their rows are
padded, which costs an extra pass.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _vma
from pallas_kernels._configs import PerBlock
from pallas_kernels.pack.reference import lanes, words

LANES = 128


@dataclasses.dataclass(frozen=True)
class Config(PerBlock):
    """The rows are those of all fields of the words."""

    rows: int = 2048


def _pack_kernel(planes_ref: Any, out_ref: Any, *, bits: int) -> None:
    word = planes_ref[0].astype(jnp.uint32)
    for plane in range(1, planes_ref.shape[0]):
        word = word + (planes_ref[plane].astype(jnp.uint32) << jnp.uint32(plane * bits))
    out_ref[...] = word


def pack(
    numbers: jax.Array, *, bits: int, config: Config | None = None, interpret: Any = False
) -> jax.Array:
    """See `reference.pack`."""
    if numbers.size == 0:
        return numbers.ravel().astype(jnp.uint32)
    if numbers.dtype == jnp.bool:
        numbers = numbers.astype(jnp.uint8)
    planes, width = lanes(bits), words(numbers.size, bits)
    flat = jnp.pad(numbers.ravel(), (0, planes * width - numbers.size))
    padded = jnp.pad(flat.reshape(planes, width), ((0, 0), (0, -width % LANES)))
    operand = padded.reshape(planes, -1, LANES)
    rows = operand.shape[1]
    block = min(rows, (config or Config.of(numbers.dtype)).rows_of_plane(planes))
    packed = pl.pallas_call(
        functools.partial(_pack_kernel, bits=bits),
        grid=(pl.cdiv(rows, block),),
        in_specs=[pl.BlockSpec((planes, block, LANES), lambda i: (0, i, 0))],
        out_specs=pl.BlockSpec((block, LANES), lambda i: (i, 0)),
        out_shape=_vma.like(operand, (rows, LANES), jnp.uint32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
    )(operand)
    return packed.ravel()[:width]


def _unpack_kernel(packed_ref: Any, out_ref: Any, *, bits: int) -> None:
    word = packed_ref[...]
    for plane in range(out_ref.shape[0]):
        out_ref[plane] = (word >> jnp.uint32(plane * bits)) & jnp.uint32(2**bits - 1)


def unpack(
    packed: jax.Array,
    *,
    bits: int,
    shape: tuple[int, ...],
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See `reference.unpack`."""
    if packed.size == 0:
        return packed.reshape(shape)
    planes, width = lanes(bits), packed.size
    operand = jnp.pad(packed, (0, -width % LANES)).reshape(-1, LANES)
    rows = operand.shape[0]
    block = min(rows, (config or Config.of(packed.dtype)).rows_of_plane(planes))
    fields = pl.pallas_call(
        functools.partial(_unpack_kernel, bits=bits),
        grid=(pl.cdiv(rows, block),),
        in_specs=[pl.BlockSpec((block, LANES), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((planes, block, LANES), lambda i: (0, i, 0)),
        out_shape=_vma.like(operand, (planes, rows, LANES), jnp.uint32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
    )(operand)
    flat = fields.reshape(planes, -1)[:, :width].ravel()
    return flat[: math.prod(shape)].reshape(shape)
