"""How many bundles of instructions kernels take on TPUs; `docs/kernels.md` has the limits.

libtpu reads its options when it is loaded, so another process compiles and has it write its code.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

SKETCH = """
import jax, jax.numpy as jnp
from pallas_kernels import count_sketch
from tests.aot.compiling import compile_for
from tests.aot.conftest import tpu_mesh

SIZE, ROWS, COLUMNS = 2**26, 3, {columns}

def encode(x, seeds):
    options = {{"rows": ROWS, "columns": COLUMNS, "implementation": "mosaic_tpu"}}
    return count_sketch.encode(x, seeds, **options)

def decode(table, seeds):
    options = {{"shape": (SIZE,), "estimate": "median", "implementation": "mosaic_tpu"}}
    return count_sketch.decode(table, seeds, **options)

function, shape = {{"encode": (encode, (SIZE,)), "decode": (decode, (ROWS, COLUMNS))}}["{function}"]
x, seeds = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((2,), jnp.uint32)
compile_for(tpu_mesh("v5e:2x2", 1), function, (x, seeds))
"""


QUANTIZE = """
import jax, jax.numpy as jnp
from pallas_kernels import quantize
from tests.aot.compiling import compile_for
from tests.aot.conftest import tpu_mesh

def to_bytes(x, scale, seeds):
    options = {{"levels": 127, "bits": 8, "implementation": "mosaic_tpu"}}
    return quantize.quantize(x, scale, seeds, **options)

x, scale = jax.ShapeDtypeStruct((2**26,), "{dtype}"), jax.ShapeDtypeStruct((), jnp.float32)
seeds = jax.ShapeDtypeStruct((2,), jnp.uint32)
compile_for(tpu_mesh("{chip}:2x2", 1), to_bytes, (x, scale, seeds))
"""


def longest_loop(text: str) -> int:
    """The bundles of the longest of the loops that have none inside."""
    lengths, begin = [], None
    for line in text.splitlines():
        bundle = re.match(r"\s*0x([0-9a-f]+)\s*(LB)?\s*:\s*(>*)", line)
        if bundle is None:
            continue
        if bundle[2]:
            begin = int(bundle[1], 16), len(bundle[3])
        elif begin and len(bundle[3]) < begin[1]:
            begin = None
        if begin and "sbr.rel" in line and len(bundle[3]) == begin[1]:
            lengths.append(int(bundle[1], 16) - begin[0] + 1)
            begin = None
    return max(lengths, default=0)


def only_loop(text: str) -> int:
    """The bundles of the only loop, over blocks, whether or not it branches forward inside."""
    (begin,) = re.findall(r"^\s*0x([0-9a-f]+)\s*LB\s*:", text, re.MULTILINE)
    *_, end = re.findall(r"^\s*0x([0-9a-f]+)[^\n]*sbr\.rel", text, re.MULTILINE)
    return int(end, 16) - int(begin, 16) + 1


def kernels_of(program: str, folder: pathlib.Path, instruction: str) -> list[str]:
    """The code that libtpu writes for `program`, of kernels that have this instruction."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("no libtpu: nothing can be compiled for TPU")
    options = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    environment = os.environ | {"LIBTPU_INIT_ARGS": options}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    files = [file for file in folder.rglob("*-final_bundles.txt") if "schedule" not in file.name]
    return [text for file in files if instruction in (text := file.read_text())]


@pytest.mark.parametrize(
    ("function", "columns", "planes", "most"),
    [
        ("encode", 2**18, 64, 640),  # Two tiles. Memory takes 480 cycles.
        ("encode", 2**16, 64, 680),  # Eight.
        ("encode", 2**14, 32, 740),  # 16; 240 cycles.
        ("decode", 2**18, 32, 630),  # One; 240.
        ("decode", 2**14, 2, 100),  # One; 15.
    ],
)
def test_sketch(
    function: str, columns: int, planes: int, most: int, tmp_path: pathlib.Path
) -> None:
    """Bundles per iteration of the loop, for all three rows.

    At 1.5 GHz and 819 GB/s, one read or write of 4 bytes takes 7.5 cycles per plane of 1024.
    """
    program = SKETCH.format(function=function, columns=columns)
    kernels = kernels_of(program, tmp_path, "vpop.permute")
    bundles = max(map(longest_loop, kernels))
    assert 7.5 * planes < bundles <= most


@pytest.mark.parametrize(
    ("chip", "dtype", "most"),
    [
        ("v5e", "float32", 680),  # Memory takes 1200 cycles.
        ("v5e", "bfloat16", 710),  # 720
        ("v6e", "float32", 699),  # 699
        ("v6e", "bfloat16", 730),  # 420
    ],
)
def test_quantize_to_8_bits(chip: str, dtype: str, most: int, tmp_path: pathlib.Path) -> None:
    """Bundles per block of 2**17 numbers."""
    program = QUANTIZE.format(chip=chip, dtype=dtype)
    (kernel,) = kernels_of(program, tmp_path, str(0x7FEB352D))  # A factor of the hash.
    assert 500 < only_loop(kernel) <= most
