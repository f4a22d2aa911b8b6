"""How many instructions kernels take on H200, an element.

`docs/kernels.md` has the limits that follow. The code is what ptxas makes of Mosaic's PTX,
read by nvdisasm, which is on PyPI (nvidia-cuda-nvdisasm) and needs no GPU.
"""

import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from pallas_kernels import block_float, count_sketch
from pallas_kernels.count_sketch import tiling
from tests.aot.compiling import RAGGED, WHOLE, compile_for, disassembled

ROWS, COLUMNS = 3, 2**17
ELEMENTS = 8  # Of a thread, in a block of `decode`, or in a step of the loop of `encode`.

# What moves data, branches or synchronizes. All others take a place in a pipe for arithmetic.
OTHER = re.compile(
    r"(LD|ST|BAR|BRA|EXIT|SYNCS|UTMA|UBLK|NOP|FENCE|MEMBAR|ELECT|BSSY|BSYNC|WARPSYNC|S2|R2UR|CS2R|"
    r"DEPBAR|VOTE|PLOP|CALL|RET|ULDC|YIELD|ERRBAR|CCTL|NANOSLEEP)"
)
LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*)")


class Code(NamedTuple):
    """The instructions of a kernel, in order, and the loops among them."""

    opcodes: list[str]
    loops: list[tuple[int, int]]  # First and last instruction.

    def arithmetic(self, first: int = 0, last: int | None = None) -> float:
        """Instructions of arithmetic per element."""
        chosen = self.opcodes[first : None if last is None else last + 1]
        return sum(not OTHER.match(opcode) for opcode in chosen) / ELEMENTS


def read(text: str) -> Code:
    """What nvdisasm prints."""
    opcodes, labels, branches = [], {}, []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(opcodes)
        elif instruction := LINE.search(line):
            if instruction[1].startswith("BRA") and (to := re.search(r"\.L\w+", instruction[2])):
                branches.append((len(opcodes), to[0]))
            opcodes.append(instruction[1])
    loops = [(labels[to], at) for at, to in branches if labels.get(to, at) < at]
    return Code(opcodes, loops)


def code_of(folder: pathlib.Path) -> Code:
    """The only kernel of Mosaic in `folder`."""
    (text,) = disassembled(folder)
    return read(text)


SEEDS = jax.ShapeDtypeStruct((2,), jnp.uint32)


@pytest.mark.parametrize("size", [WHOLE, RAGGED])
def test_encode_takes_17_instructions_per_element_and_row(
    size: int, h200: Mesh, machine_code: pathlib.Path
) -> None:
    def encode(x: jax.Array, seeds: jax.Array) -> jax.Array:
        options = {"rows": ROWS, "columns": COLUMNS}
        return count_sketch.encode(x, seeds, **options, implementation="mosaic_gpu")

    compiled = compile_for(h200, encode, (jax.ShapeDtypeStruct((size,), jnp.float32), SEEDS))
    # Partial tables: no copy of the array, of whatever size.
    assert compiled.memory_analysis().temp_size_in_bytes <= 3 * ROWS * COLUMNS * 4 + 2**14
    code = code_of(machine_code)
    loops = [code.arithmetic(*loop) for loop in code.loops if "FADD" in code.opcodes[slice(*loop)]]
    assert loops and 5 < max(loops) <= 17
    within = max(code.loops, key=lambda loop: code.arithmetic(*loop))
    barriers = sum(opcode.startswith("BAR") for opcode in code.opcodes[slice(*within)])
    assert barriers == 1  # All threads have read a plane before the next one replaces it.


@pytest.mark.parametrize("size", [WHOLE, RAGGED])
@pytest.mark.parametrize(("estimate", "most"), [("median", 51), ("mean", 43)])
def test_decode(
    estimate: str, most: int, size: int, h200: Mesh, machine_code: pathlib.Path
) -> None:
    def decode(table: jax.Array, seeds: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"shape": (size,), "estimate": estimate}
        return count_sketch.decode(table, seeds, **options, implementation="mosaic_gpu")

    compiled = compile_for(
        h200, decode, (jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32), SEEDS)
    )
    assert compiled.memory_analysis().temp_size_in_bytes <= 2**14  # The rest is not copied.
    code = code_of(machine_code)
    assert 15 < code.arithmetic() <= most
    copies = sum(opcode.startswith("UBLKCP") for opcode in code.opcodes)
    assert copies == ROWS  # One of each row.
    # When the barrier in memory is ready for copies, and when all lanes are turned.
    assert sum(opcode.startswith("BAR") for opcode in code.opcodes) == 2


@pytest.mark.parametrize(
    ("dtype", "block_size", "stochastic", "most"),
    [
        ("float8_e4m3fn", 32, True, 28.75),
        ("float8_e4m3fn", 32, False, 19.5),
        ("float8_e5m2", 32, True, 28.75),
        ("int8", 32, True, 27.75),
        ("int8", 256, True, 24.75),
        ("int8", 256, False, 8.5),
    ],
)
def test_block_float(
    dtype: Any,
    block_size: int,
    stochastic: bool,
    most: float,
    h200: Mesh,
    machine_code: pathlib.Path,
) -> None:
    def encode(x: jax.Array, seeds: jax.Array) -> Any:
        options: dict[str, Any] = {"dtype": dtype, "block_size": block_size}
        given = seeds if stochastic else None
        return block_float.encode(x, given, **options, implementation="mosaic_gpu")

    # Mosaic writes the PTX of a program once, and other tests compile that of WHOLE.
    compile_for(h200, encode, (jax.ShapeDtypeStruct((2 * WHOLE,), jnp.float32), SEEDS))
    code = code_of(machine_code)
    assert 0.75 * most < code.arithmetic() <= most
    # Of a thread and its 8 numbers: two loads of 16 bytes, two stores of 4.
    assert sum(opcode.startswith("LD.E.128") for opcode in code.opcodes) == 2
    assert sum(opcode == "ST.E" for opcode in code.opcodes) == 2


def test_block_float_copies_no_array_that_ends_within_a_block(h200: Mesh) -> None:
    def encode(x: jax.Array, seeds: jax.Array) -> Any:
        return block_float.encode(x, seeds, implementation="mosaic_gpu")

    compiled = compile_for(h200, encode, (jax.ShapeDtypeStruct((RAGGED,), jnp.float32), SEEDS))
    assert compiled.memory_analysis().temp_size_in_bytes <= 2**12


def test_small_tables_fill_the_device() -> None:
    """An H200 has 132 multiprocessors. Parts of the rounds make enough blocks of each plane."""
    for columns in (1024, 16_384, 2**18):
        shapes = tiling.tiling(2**26, columns)
        assert ROWS * shapes.parts * shapes.slots * shapes.planes > 132
