"""Kernels for GPU find their example of a batch by 64-bit offsets.

Within an example they count in int32, and refuse 2**31 elements; a batch may have more.
"""

import pathlib
import re

import jax
import pytest
from jax.sharding import Mesh

from pallas_kernels.arg_specs import Row
from tests.aot.compiling import compile_for, first_of_each_op, ptx_of

BATCH, SIZE = 16, 2**28
BLOCK = re.compile(r"mov\.u32\s+(%r\d+), %ctaid\.([yz]);")
WIDE = re.compile(r"mul\.wide\.u32\s+%rd\d+, %r\d+, (\d+);")
NARROW = re.compile(r"(?:mul\.lo|shl|mad\.lo)\.[sub]32\s+%r\d+, (%r\d+),")


def wide_factors(ptx: str) -> set[int]:
    """By what 64-bit products multiply numbers of 32 bits."""
    return set(map(int, WIDE.findall(ptx)))


def narrowly_multiplied(ptx: str) -> set[str]:
    """The numbers of examples, blocks along the last axis, that a 32-bit product takes."""
    blocks = BLOCK.findall(ptx)
    last = max(axis for _, axis in blocks)
    return {number for number, axis in blocks if axis == last} & set(NARROW.findall(ptx))


@pytest.mark.parametrize("row", first_of_each_op("mosaic_gpu"), ids=lambda row: row.label)
def test_batches_of_more_than_int32(row: Row, h200: Mesh, ptx: pathlib.Path) -> None:
    one = jax.eval_shape(lambda: row.arguments(SIZE))
    batch = [jax.ShapeDtypeStruct((BATCH, *x.shape), x.dtype) for x in one]
    compile_for(h200, jax.vmap(row.function(SIZE, "mosaic_gpu")), batch)
    text = ptx_of(ptx)[0].read_text()
    # In elements, or in bytes of float32: BATCH of them are beyond 2**31.
    assert wide_factors(text) & {SIZE, 4 * SIZE}
    assert not narrowly_multiplied(text)


def test_searched_instructions() -> None:
    block = "mov.u32 \t%r36, %ctaid.y;\n"
    assert wide_factors(block + "mul.wide.u32 \t%rd7, %r36, 268435456;") == {SIZE}
    assert narrowly_multiplied(block + "mul.wide.u32 \t%rd7, %r36, 268435456;") == set()
    assert narrowly_multiplied(block + "mul.lo.s32 \t%r7, %r36, 77;") == {"%r36"}
    assert narrowly_multiplied(block + "shl.b32 \t%r7, %r36, 28;") == {"%r36"}
