"""Consecutive numbers of an array, divided among the blocks of a GPU kernel without a race."""

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl


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
