"""`encode` as a Mosaic kernel for GPU: one pass over memory.

Each row has the coordinates that share a scale, and 128 threads process several rows. Lanes of one
warp hold a row, each some neighbors of it, so the largest magnitude is a maximum over the numbers
of a lane, then over lanes. The last block ends at the last row, so it overlaps the block before it,
and both write the same numbers. Arrays that end within a row, or are smaller than a block, are
padded in a separate pass.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _hash, _versions, _vma
from pallas_kernels._checks import require, require_int32
from pallas_kernels._configs import Config as _Config
from pallas_kernels._configs import require_field
from pallas_kernels.block_float import reference
from pallas_kernels.block_float.formats import FORMATS

WARPS, LANES = 4, 32


@dataclasses.dataclass(frozen=True)
class Config(_Config):
    """What changes the speed of the kernel, and never its result.

    Raises:
      ValueError: If a field is not one of its values.
    """

    vector: int  # Adjacent numbers that a lane reads at once: 4 or 8.
    numbers: int  # Of a lane, unless a row needs more: 8, 16 or 32.

    def __post_init__(self) -> None:
        require_field("vector", self.vector, (4, 8), "4 or 8")
        require_field("numbers", self.numbers, (8, 16, 32), "8, 16 or 32")

    @classmethod
    def of(cls, dtype: jax.typing.DTypeLike) -> "Config":
        """An assumption: the widest reads, 16 bytes, and few registers."""
        return cls(vector=16 // jnp.dtype(dtype).itemsize, numbers=8)

    @classmethod
    def candidates(cls, dtype: jax.typing.DTypeLike) -> tuple["Config", ...]:
        """More numbers have more reads under way, and need more registers."""
        widest = cls.of(dtype).vector
        narrower = [cls(4, numbers) for numbers in (8, 16)] if widest > 4 else []
        return (*(cls(widest, numbers) for numbers in (8, 16, 32)), *narrower)

    def tile(self, block_size: int) -> tuple[int, int]:
        """Rows that lanes of a warp hold side by side, and the columns that they hold of each."""
        lanes = min(LANES, block_size // self.vector)
        return LANES // lanes, lanes * self.vector

    def rows(self, block_size: int) -> int:
        """Rows of a block of 128 threads."""
        side, columns = self.tile(block_size)
        return WARPS * side * max(1, self.numbers * columns // (self.vector * block_size))


def _encode_kernel(
    seeds_ref: Any,
    x_ref: Any,
    codes_ref: Any,
    exponents_ref: Any,
    *,
    config: Config,
    dtype: str,
    stochastic: bool,
    interpret: Any,
) -> None:
    form, (total, block_size) = FORMATS[dtype], x_ref.shape
    rows = config.rows(block_size)
    first = lax.min(lax.axis_index("block") * rows, total - rows)
    here = pl.ds(first, rows)
    tile = config.tile(block_size)
    x = _versions.by_rows(x_ref[here], *tile, config.vector, interpret).astype(jnp.float32)
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
    config: Config | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `reference.encode`."""
    config = config or Config.of(x.dtype)
    require(
        config.vector * x.dtype.itemsize <= 16,
        f"`vector`={config.vector} of {x.dtype} is more than the 16 bytes of a read.",
    )
    require_int32(x.size)
    options: dict[str, Any] = {"dtype": dtype, "stochastic": stochastic}
    if not x.size:
        return reference.encode(x, seeds, block_size=block_size, **options)
    rows = config.rows(block_size)
    total = max(pl.cdiv(x.size, block_size), rows)
    padded = jnp.pad(x.ravel(), (0, total * block_size - x.size)).reshape(total, block_size)
    operand, seeds = _vma.equally_varying(padded, seeds)
    codes, exponents = _versions.gpu_kernel(
        functools.partial(_encode_kernel, config=config, interpret=interpret, **options),
        out_type=(
            _vma.like(operand, operand.shape, jnp.int8 if FORMATS[dtype].is_integer else jnp.uint8),
            _vma.like(operand, (total,), jnp.uint8),
        ),
        grid={"block": pl.cdiv(total, rows)},
        interpret=interpret,
    )(seeds, operand)
    elements = reference.to_elements(codes.ravel()[: x.size].reshape(x.shape), dtype)
    return elements, exponents[: pl.cdiv(x.size, block_size)]
