"""The blocks of kernels for GPU: pieces of an array without a race, and batches under `jax.vmap`.

A batch is an axis of the grid of blocks. CUDA has three axes, of which only one may have more than
65,535 blocks, and Mosaic gives that one to the last axis of a kernel. Larger batches are launched
one part after the other.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl

MOST = 2**16 - 1


def require_int32(size: int) -> None:
    """Raises unless a kernel that indexes elements in int32 can process `size` of them.

    Raises:
      NotImplementedError: If it cannot.
    """
    if size >= 2**31:
        raise NotImplementedError(
            f"The GPU kernel indexes elements in int32, so {size} elements are too many: split the "
            "leaf."
        )


def by_pieces(
    length: int, block: int, unit: int, process: Callable[..., None]
) -> Callable[..., None]:
    """A kernel that calls `process(first, count, *refs)` for each piece that its block has.

    The kernel has `length // block` blocks along the axis `block`. Each has a piece of `block`
    numbers, and the last one also the rest. No two blocks have the same number. The last block may
    have a number twice, so no result may be stored in the place of an operand.

    Args:
      length: How many numbers there are, at least `block`.
      block: The count of a piece, a multiple of `unit`.
      unit: What the count of every piece is a multiple of.
      process: Takes the first number and the count of a piece, and the references of the kernel.
    """
    # Whole units. If these are more than the rest, the piece begins within the one before it.
    last = pl.cdiv(length % block, unit) * unit

    def kernel(*refs: Any) -> None:
        index = lax.axis_index("block")
        process(index * block, block, *refs)
        if last:
            is_last = index == length // block - 1
            pl.when(is_last)(lambda: process(length - last, last, *refs))

    return kernel


def in_launches(
    kernel: Callable[..., Any], grid: tuple[int, ...], most: int = MOST
) -> Callable[..., Any]:
    """`kernel`, whose batches under `jax.vmap`, nested or not, have at most `most` blocks an axis.

    Args:
      kernel: A Mosaic GPU kernel of arrays.
      grid: Its number of blocks along each axis.
      most: The most blocks along all axes but the last, where the third one from the end and those
        before it are one axis.
    """
    # Mosaic makes one axis of the batch and of all but the last two.
    examples = most // math.prod(grid[:-2])

    @custom_vmap
    def call(*operands: jax.Array) -> Any:
        return kernel(*operands)

    @call.def_vmap
    def _rule(size: int, in_batched: Sequence[bool], *operands: jax.Array) -> tuple[Any, Any]:
        axes = [0 if batched else None for batched in in_batched]
        if size <= examples:
            batch = jax.vmap(kernel, axes, axis_size=size)
            out = in_launches(batch, (size, *grid), most)(*operands)
        else:

            def one(given: list[jax.Array]) -> Any:
                rows = iter(given)
                arguments = zip(operands, in_batched, strict=True)
                return call(*(next(rows) if batched else a for a, batched in arguments))

            given = [a for a, batched in zip(operands, in_batched, strict=True) if batched]
            out = lax.map(one, given, batch_size=examples)
        return out, jax.tree.map(lambda _: True, out)

    return call


def unless_batched(function: Callable[..., Any], batched: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays, or `batched`, with the same results, of each example of a batch."""

    @custom_vmap
    def call(*operands: jax.Array) -> Any:
        return function(*operands)

    @call.def_vmap
    def _rule(size: int, in_batched: Sequence[bool], *operands: jax.Array) -> tuple[Any, Any]:
        axes = [0 if is_batched else None for is_batched in in_batched]
        out = jax.vmap(batched, axes, axis_size=size)(*operands)
        return out, jax.tree.map(lambda _: True, out)

    return call
