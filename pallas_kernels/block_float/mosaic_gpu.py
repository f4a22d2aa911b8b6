"""`encode` as a Mosaic kernel for GPU: one pass over memory.

Each row has the coordinates that share a scale, and 128 threads process several rows. Lanes of one
warp hold a row, each some neighbors of it, so the largest magnitude is a maximum over the numbers
of a lane, then over lanes. The last block of threads also has the rest, and no two blocks write the
same number. XLA encodes the last row of an array that ends within it. Arrays that are smaller than
a block are padded, and so are those of a batch that end within a row: a separate pass.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu, _hash, _vma
from pallas_kernels._configs import Config as _Config
from pallas_kernels._configs import require_field
from pallas_kernels._gpu import by_pieces, require_int32, unless_batched
from pallas_kernels.block_float import reference

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

    def require_for(self, dtype: jax.typing.DTypeLike) -> None:
        """Raises ValueError if a lane would read more than 16 bytes at once."""
        dtype = jnp.dtype(dtype)
        if self.vector * dtype.itemsize > 16:
            raise ValueError(
                f"`vector`={self.vector} of {dtype} is more than the 16 bytes of a read."
            )

    def tile(self, block_size: int) -> tuple[int, int]:
        """Rows that lanes of a warp hold side by side, and the columns that they hold of each."""
        lanes = min(LANES, block_size // self.vector)
        return LANES // lanes, lanes * self.vector

    def rows(self, block_size: int) -> tuple[int, int]:
        """Rows of a block of 128 threads, and those that its lanes hold at once."""
        side, columns = self.tile(block_size)
        unit = WARPS * side
        return unit * max(1, self.numbers * columns // (self.vector * block_size)), unit


def _encode_rows(
    first: jax.Array | int,
    rows: int,
    seeds_ref: Any,
    x_ref: Any,
    codes_ref: Any,
    exponents_ref: Any,
    *,
    config: Config,
    dtype: str,
    block_size: int,
    stochastic: bool,
    interpret: Any,
) -> None:
    form, shape = reference.FORMATS[dtype], (rows, block_size)
    loaded = _gpu.load_rows(x_ref, first, shape, interpret)
    tile = config.tile(block_size)
    x = _gpu.by_rows(loaded, *tile, config.vector, interpret).astype(jnp.float32)
    exponents = reference.exponents_of(jnp.max(reference.magnitudes(x), axis=1), form)
    noise = None
    if stochastic:
        row, column = (lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1))
        position = (jnp.asarray(first, jnp.uint32) + row) * jnp.uint32(block_size) + column
        noise = _hash.bits(position, seeds_ref[0], seeds_ref[1])
    factor, zeros = (lax.broadcast_in_dim(a, shape, (0,)) for a in reference.factors_of(exponents))
    words = reference.round_in_block(x, factor, zeros, noise, form)
    _gpu.store_rows(codes_ref, first, reference.to_bytes(words), interpret)
    narrow = exponents_ref.at[pl.ds(first, rows)]
    _gpu.store_narrow(narrow, exponents.astype(jnp.uint8), interpret)


def _encode_flat(
    x: jax.Array,
    seeds: jax.Array,
    *,
    config: Config,
    interpret: Any,
    dtype: str,
    block_size: int,
    stochastic: bool,
) -> tuple[jax.Array, jax.Array]:
    """`encode` of a flat array that fills a block of threads or more; XLA encodes its last row."""
    options: dict[str, Any] = {"dtype": dtype, "block_size": block_size, "stochastic": stochastic}
    whole, rest = divmod(x.size, block_size)
    rows, unit = config.rows(block_size)
    encode_rows = functools.partial(_encode_rows, config=config, interpret=interpret, **options)
    codes, exponents = _gpu.gpu_kernel(
        by_pieces(whole, rows, unit, encode_rows),
        out_type=(
            _vma.like(x, x.shape, jnp.int8),
            _vma.like(x, (pl.cdiv(x.size, block_size),), jnp.uint8),
        ),
        grid={"block": whole // rows},
        interpret=interpret,
    )(seeds, x)
    elements = reference.to_elements(codes, dtype)
    if rest:
        first = whole * block_size
        last = reference.encode(x[first:], seeds, first=first, **options)
        elements, exponents = (
            lax.dynamic_update_slice(all, end, (all.size - end.size,))
            for all, end in zip((elements, exponents), last, strict=True)
        )
    return elements, exponents


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
    config.require_for(x.dtype)
    require_int32(x.size)
    options: dict[str, Any] = {"dtype": dtype, "block_size": block_size, "stochastic": stochastic}
    if not x.size:
        return reference.encode(x, seeds, **options)

    def encode_flat(x: jax.Array, seeds: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _encode_flat(x, seeds, config=config, interpret=interpret, **options)

    def padded(x: jax.Array, seeds: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of whole rows."""
        total = max(pl.cdiv(x.size, block_size), config.rows(block_size)[0])
        elements, exponents = encode_flat(jnp.pad(x, (0, total * block_size - x.size)), seeds)
        return elements[: x.size], exponents[: pl.cdiv(x.size, block_size)]

    fills = x.size >= config.rows(block_size)[0] * block_size
    operand, seeds = _vma.equally_varying(x.ravel(), seeds)
    if fills and x.size % block_size:
        # Of a batch, only the first example would begin where 16 bytes may be read.
        found = unless_batched(encode_flat, padded)(operand, seeds)
        # JAX loses the mesh axes over which the results of such a function vary.
        elements, exponents = (
            _vma.declared(a, _vma.like(operand, a.shape, a.dtype)) for a in found
        )
    else:
        elements, exponents = padded(operand, seeds)
    return elements.reshape(x.shape), exponents
