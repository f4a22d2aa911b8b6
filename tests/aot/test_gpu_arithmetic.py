"""How many instructions of the ALU quantizing takes on H200, an element: kernels and XLA.

`docs/kernels.md` has the arithmetic of these budgets.
"""

import pathlib
import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from pallas_kernels import exponential
from pallas_kernels._dispatch import Implementation
from pallas_kernels.quantize import quantize
from tests.aot.compiling import WHOLE, compile_for
from tests.aot.test_gpu_instructions import OTHER, read

# Pipes of their own: multiplications and float additions, conversions, and what a warp shares.
ELSEWHERE = re.compile(r"IMAD|FADD|FMUL|FFMA|F2I|I2F|MUFU|FLO|U[A-Z]")
# In a hash this factor occurs once an element.
FACTOR = "0x7feb352d"

Op = Callable[[Implementation], Callable[..., Any]]


def _quantize(bits: int) -> Op:
    options: dict[str, Any] = {"levels": 2 ** (bits - 1) - 1, "bits": bits}
    return lambda name: (
        lambda x, scale, seeds: quantize(x, scale, seeds, **options, implementation=name)
    )


SIZE = 4 * WHOLE  # Mosaic writes the PTX of a program once, and other tests compile that of WHOLE.
FLOATS = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
HALVES = jax.ShapeDtypeStruct((SIZE,), jnp.bfloat16)
CODES = jax.ShapeDtypeStruct((SIZE,), jnp.uint8)
SCALE, SEEDS = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.uint32)
OPS: dict[str, tuple[Op, tuple[Any, ...]]] = {
    "quantize": (_quantize(8), (FLOATS, SCALE, SEEDS)),
    "quantize bfloat16": (_quantize(8), (HALVES, SCALE, SEEDS)),
    "encode": (
        lambda name: (
            lambda x, scale, seeds: exponential.encode(
                x, scale, seeds, headroom=3, implementation=name
            )
        ),
        (FLOATS, SCALE, SEEDS),
    ),
    "add": (
        lambda name: lambda a, b, seeds: exponential.add(a, b, seeds, implementation=name),
        (CODES, CODES, SEEDS),
    ),
}
MOST: dict[str, dict[Implementation, float]] = {
    "quantize": {"reference": 12, "mosaic_gpu": 13},
    "quantize bfloat16": {"reference": 12, "mosaic_gpu": 13},
    "encode": {"reference": 17, "mosaic_gpu": 17},
    "add": {"reference": 25, "mosaic_gpu": 26},
}


def alu_per_element(folder: pathlib.Path) -> float:
    """Of the kernel in `folder` that hashes."""
    kernels = []
    for ptx in folder.rglob("*.ptx"):
        target = re.search(r"^\.target (\w+)", ptx.read_text(), re.MULTILINE)
        if target is None or ".entry" not in ptx.read_text():
            continue
        cubin = ptx.with_suffix(".cubin")
        subprocess.run(["ptxas", f"-arch={target[1]}", "-o", cubin, ptx], check=True)
        said = subprocess.run(["nvdisasm", "-c", cubin], capture_output=True, text=True, check=True)
        if FACTOR in said.stdout:
            kernels.append(said.stdout)
    (text,) = kernels
    counted = [code for code in read(text).opcodes if not OTHER.match(code)]
    return sum(not ELSEWHERE.match(code) for code in counted) / text.count(FACTOR)


@pytest.mark.parametrize("name", ["reference", "mosaic_gpu"])
@pytest.mark.parametrize("op", OPS)
def test_budget(
    op: str,
    name: Implementation,
    h200: Mesh,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if shutil.which("nvdisasm") is None:
        pytest.skip("no CUDA compiler: there is no nvdisasm on PATH")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    build, arguments = OPS[op]
    dumped = {"xla_dump_to": str(tmp_path), "xla_dump_emitter_re": ".*"}
    compile_for(h200, build(name), arguments, **dumped)
    assert 8 < alu_per_element(tmp_path) <= MOST[op][name]
