"""`encode` as a Pallas kernel for TPU: one pass over memory.

The array is viewed as rows of 128 lanes, in squares of 128 rows. Every lane of a block learns its
largest magnitude by exchanges between lanes, and between rows, at distances of powers of two. The
square of exponents is transposed, so that one exponent per block is written, in full lanes. Sizes
that do not fill a square are padded, which costs an extra pass.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _hash, _vma
from pallas_kernels._configs import Config as _Config
from pallas_kernels._configs import require_field
from pallas_kernels.block_float import reference

LANES = 128


@dataclasses.dataclass(frozen=True)
class Config(_Config):
    """What changes the speed of the kernel, and never its result.

    Raises:
      ValueError: If a field is not one of its values.
    """

    squares: int = 8  # Of 128 x 128 numbers in one block, 1 to 16: 64 KiB of float32 each.

    def __post_init__(self) -> None:
        require_field("squares", self.squares, range(1, 17), "in 1 to 16")

    @classmethod
    def candidates(cls, dtype: jax.typing.DTypeLike) -> tuple["Config", ...]:
        """Larger blocks start fewer copies, and leave less space in VMEM."""
        return tuple(cls(squares) for squares in (8, 2, 4, 16))


def _largest_of_partners(word: jax.Array, distance: int, axis: int) -> jax.Array:
    """The larger of each word and that of its partner at `distance` along `axis`."""
    length = word.shape[axis]
    place = jax.lax.broadcasted_iota(jnp.int32, word.shape, axis)
    before = pltpu.roll(word, distance, axis)
    behind = pltpu.roll(word, length - distance, axis)
    return jnp.maximum(word, jnp.where((place & distance) != 0, before, behind))


def _encode_kernel(
    seeds_ref: Any,
    x_ref: Any,
    codes_ref: Any,
    exponents_ref: Any,
    *,
    dtype: str,
    block_size: int,
    stochastic: bool,
) -> None:
    form = reference.FORMATS[dtype]
    shape = (LANES, LANES)
    row = jax.lax.broadcasted_iota(jnp.uint32, shape, 0)
    lane = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
    squares = exponents_ref.shape[0]
    groups = exponents_ref.shape[1]
    for square in range(squares):
        here = pl.ds(square * LANES, LANES)
        x = x_ref[here, :].astype(jnp.float32)
        largest = reference.magnitudes(x)
        distance = 1
        while distance < block_size:
            along_lanes = distance < LANES
            step = distance if along_lanes else distance // LANES
            largest = _largest_of_partners(largest, step, 1 if along_lanes else 0)
            distance *= 2
        exponents = reference.exponents_of(largest, form)
        noise = None
        if stochastic:
            first = (pl.program_id(0) * (squares * LANES) + square * LANES).astype(jnp.uint32)
            position = (first + row) * jnp.uint32(LANES) + lane
            noise = _hash.bits(position, seeds_ref[0, 0], seeds_ref[0, 1])
        words = reference.round_in_block(x, *reference.factors_of(exponents), noise, form)
        codes_ref[here, :] = reference.to_bytes(words)
        by_lane = exponents.T
        for group in range(groups):
            start = group * (LANES // groups)
            exponents_ref[square, pl.ds(group, 1), :] = by_lane[start : start + 1]


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
    options: dict[str, Any] = {
        "dtype": dtype,
        "block_size": block_size,
        "stochastic": stochastic,
    }
    if not x.size:
        return reference.encode(x, seeds, **options)
    square = LANES * LANES
    padded = jnp.pad(x.ravel(), (0, -x.size % square)).reshape(-1, LANES)
    operand, seeds = _vma.equally_varying(padded, seeds)
    squares = operand.shape[0] // LANES
    count = min((config or Config()).squares, squares)
    groups = max(LANES // block_size, 1)
    codes, exponents = pl.pallas_call(
        functools.partial(_encode_kernel, **options),
        grid=(pl.cdiv(squares, count),),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((count * LANES, LANES), lambda i: (i, 0)),
        ],
        out_specs=[
            pl.BlockSpec((count * LANES, LANES), lambda i: (i, 0)),
            pl.BlockSpec((count, groups, LANES), lambda i: (i, 0, 0)),
        ],
        out_shape=[
            _vma.like(operand, operand.shape, jnp.int8),
            _vma.like(operand, (squares, groups, LANES), jnp.int32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
    )(seeds.reshape(1, 2), operand)
    elements = reference.to_elements(codes.ravel()[: x.size].reshape(x.shape), dtype)
    # [squares, groups, rows] as rows of groups; of blocks that are longer than a row, the first.
    by_row = exponents.astype(jnp.uint8).transpose(0, 2, 1).reshape(-1, groups)
    by_block = by_row[:: max(block_size // LANES, 1)].ravel()
    return elements, by_block[: -(-x.size // block_size)]
