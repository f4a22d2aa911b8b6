"""Kernels for GPU under `jax.vmap`.

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

MOST = 2**16 - 1


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
