"""Every kernel, and XLA's program of every reference, compiles for H200 as it should.

What is read is the PTX that XLA and Mosaic write, and what ptxas says of it. It is the last step
before machine code that a machine without a GPU and its disassembler can show.
"""

import pathlib
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from pallas_kernels.arg_specs import ROWS, Row
from tests.aot.compiling import (
    RAGGED,
    WHOLE,
    assembled,
    compile_for,
    compile_row,
    dumped,
    first_of_each_op,
    ptx_of,
    temporary_bytes,
)

COMPARE_AND_SWAP = re.compile(r"\batom\S*\.cas\b")
# Instructions on float32 whose results are not those of IEEE 754 on other backends.
INEXACT = re.compile(r"\b(?:div\.full|div\.approx|rcp\.approx|fma\.rn\.f32)\b|\.ftz\b")


def spilled(ptx: pathlib.Path) -> list[int]:
    """Bytes that each kernel in a file stores in memory and loads back for want of registers."""
    return [int(number) for number in re.findall(r"(\d+) bytes spill", assembled(ptx)[1])]


def check(folder: pathlib.Path, exact: bool) -> None:
    """No compare-and-swap loop and no spill in any PTX of `folder`; if `exact`, all is IEEE 754."""
    written = ptx_of(folder)
    assert not any(COMPARE_AND_SWAP.search(ptx.read_text()) for ptx in written)
    assert not exact or not any(INEXACT.search(ptx.read_text()) for ptx in written)
    spills = [number for ptx in written for number in spilled(ptx)]
    assert spills and not any(spills)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if "mosaic_gpu" in row.kernels], ids=lambda row: row.label
)
def test_a_kernel(row: Row, h200: Mesh, ptx: pathlib.Path) -> None:
    compiled = compile_row(row, WHOLE, h200, "mosaic_gpu", **dumped(ptx))
    assert "mosaic_gpu" in compiled.as_text()
    assert temporary_bytes(compiled) <= row.temporaries
    check(ptx, row.exact)


@pytest.mark.parametrize("row", first_of_each_op("mosaic_gpu"), ids=lambda row: row.label)
def test_padding_costs_at_most_a_copy(row: Row, h200: Mesh) -> None:
    compiled = compile_row(row, RAGGED, h200, "mosaic_gpu")
    assert temporary_bytes(compiled) <= 1.5 * row.traffic(RAGGED)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_a_reference(row: Row, h200: Mesh, tmp_path: pathlib.Path) -> None:
    compile_row(row, RAGGED, h200, "reference", **dumped(tmp_path))
    check(tmp_path, row.exact)


def test_searched_instructions_are_found(h200: Mesh, tmp_path: pathlib.Path) -> None:
    """XLA multiplies scattered float32 by compare-and-swap, and adds int32 by an instruction."""

    def found(f: Callable[..., jax.Array], dtype: jax.typing.DTypeLike) -> tuple[bool, bool]:
        folder = tmp_path / jnp.dtype(dtype).name
        arguments = (
            jax.ShapeDtypeStruct((1024,), dtype),
            jax.ShapeDtypeStruct((2**16,), jnp.int32),
            jax.ShapeDtypeStruct((2**16,), dtype),
        )
        compile_for(h200, f, arguments, **dumped(folder))
        text = "".join(ptx.read_text() for ptx in folder.rglob("*.ptx"))
        return "atom" in text, COMPARE_AND_SWAP.search(text) is not None

    assert found(lambda x, i, y: x.at[i].add(y), jnp.int32) == (True, False)
    assert found(lambda x, i, y: x.at[i].multiply(y), jnp.float32) == (True, True)
