"""`encode` as a Mosaic kernel for GPU: one pass over memory.

Each row has the coordinates that share a scale, and 128 threads process several rows. Lanes of one
warp hold a row, each some neighbors of it, so the largest magnitude is a maximum over the numbers
of a lane, then over lanes. The last block ends at the last row, so it overlaps the block before it,
and both write the same numbers. Arrays that end within a row, or are smaller than a block, are
padded in a separate pass.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _hash, _versions, _vma
from pallas_kernels._checks import require_int32
from pallas_kernels.block_float import reference
from pallas_kernels.block_float.formats import FORMATS

WARPS, LANES = 4, 32
VECTOR = 4  # Adjacent numbers of one lane: 16 bytes of float32.
UNROLL = 8  # Numbers per lane, unless a row needs more.


def _tile(block_size: int) -> tuple[int, int]:
    """Rows that the lanes of a warp hold side by side, and the columns that they hold of each."""
    lanes = min(LANES, block_size // VECTOR)
    return LANES // lanes, lanes * VECTOR


def _encode_kernel(
    seeds_ref: Any,
    x_ref: Any,
    codes_ref: Any,
    exponents_ref: Any,
    *,
    rows: int,
    dtype: str,
    stochastic: bool,
    interpret: Any,
) -> None:
    form, (total, block_size) = FORMATS[dtype], x_ref.shape
    first = lax.min(lax.axis_index("block") * rows, total - rows)
    here = pl.ds(first, rows)
    tile = _tile(block_size)
    x = _versions.by_rows(x_ref[here], *tile, VECTOR, interpret).astype(jnp.float32)
    exponents = reference.exponents_of(jnp.max(reference.magnitudes(x), axis=1), form)
    noise = None
    if stochastic:
        row, column = (lax.broadcasted_iota(jnp.uint32, x.shape, axis) for axis in (0, 1))
        position = (first.astype(jnp.uint32) + row) * jnp.uint32(block_size) + column
        noise = _hash.bits(position, seeds_ref[0], seeds_ref[1])
    shared = lax.broadcast_in_dim(exponents, x.shape, (0,))
    codes = reference.round_in_block(x, shared, noise, form)
    codes_ref[here] = codes.astype(codes_ref.dtype)
    _versions.store_narrow(exponents_ref.at[here], exponents.astype(jnp.uint8), interpret)


def encode(
    x: jax.Array,
    seeds: jax.Array,
    *,
    dtype: str,
    block_size: int,
    stochastic: bool,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `reference.encode`."""
    require_int32(x.size)
    options: dict[str, Any] = {"dtype": dtype, "stochastic": stochastic}
    if not x.size:
        return reference.encode(x, seeds, block_size=block_size, **options)
    side, columns = _tile(block_size)
    each = WARPS * side
    rows = each * max(1, UNROLL * columns // (VECTOR * block_size))
    total = max(pl.cdiv(x.size, block_size), rows)
    padded = jnp.pad(x.ravel(), (0, total * block_size - x.size)).reshape(total, block_size)
    operand, seeds = _vma.equally_varying(padded, seeds)
    codes, exponents = _versions.gpu_kernel(
        functools.partial(_encode_kernel, rows=rows, interpret=interpret, **options),
        out_type=(
            _vma.like(operand, operand.shape, jnp.int8 if FORMATS[dtype].is_integer else jnp.uint8),
            _vma.like(operand, (total,), jnp.uint8),
        ),
        grid={"block": pl.cdiv(total, rows)},
        interpret=interpret,
    )(seeds, operand)
    elements = reference.to_elements(codes.ravel()[: x.size].reshape(x.shape), dtype)
    return elements, exponents[: pl.cdiv(x.size, block_size)]
