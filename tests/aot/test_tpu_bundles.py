"""How many bundles of instructions the sketch takes on v5e; `docs/kernels.md` has the arithmetic.

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

COMPILED = f"""
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


def test_encode_is_faster_than_three_reads(tmp_path: pathlib.Path) -> None:
    """At 1.5 GHz and 819 GB/s, three reads of 4 bytes take 22 cycles per 1024 elements."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: nothing can be compiled for TPU")
    options = f"--xla_jf_dump_to={tmp_path} --xla_jf_dump_llo_text=true"
    environment = os.environ | {"LIBTPU_INIT_ARGS": options}
    subprocess.run([sys.executable, "-c", COMPILED], env=environment, check=True)
    kernels = [
        text
        for file in tmp_path.rglob("*-final_bundles.txt")
        if "vrot.lane" in (text := file.read_text()) and "schedule" not in file.name
    ]
    assert kernels
    # A step of the innermost loop adds a tile to all rows.
    most = max(map(longest_loop, kernels))
    assert 100 < most <= 22 * PLANES
