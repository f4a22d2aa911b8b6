"""How many bundles of instructions kernels take on TPUs; `docs/kernels.md` has the arithmetic.

libtpu reads its options when it is loaded, so another process compiles and has it write its code.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROWS, PLANES = 3, 32  # Of the table, and of a tile.

ENCODE = f"""
import jax, jax.numpy as jnp
from pallas_kernels import count_sketch
from tests.aot.compiling import compile_for
from tests.aot.conftest import tpu_mesh

def encode(x, seeds):
    options = {{"rows": {ROWS}, "columns": 2**18, "implementation": "mosaic_tpu"}}
    return count_sketch.encode(x, seeds, **options)

x = jax.ShapeDtypeStruct((2**26,), jnp.float32)
compile_for(tpu_mesh("v5e:2x2", 1), encode, (x, jax.ShapeDtypeStruct((2,), jnp.uint32)))
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
        pytest.skip("libtpu is not installed: nothing can be compiled for TPU")
    options = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    environment = os.environ | {"LIBTPU_INIT_ARGS": options}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    files = [file for file in folder.rglob("*-final_bundles.txt") if "schedule" not in file.name]
    return [text for file in files if instruction in (text := file.read_text())]


def test_encode_is_faster_than_three_reads(tmp_path: pathlib.Path) -> None:
    """At 1.5 GHz and 819 GB/s, three reads of 4 bytes take 22 cycles per 1024 elements."""
    kernels = kernels_of(ENCODE, tmp_path, "vperm.lane")
    assert kernels
    # A step of the innermost loop adds a tile to all rows.
    most = max(map(longest_loop, kernels))
    assert 100 < most <= 22 * PLANES


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
