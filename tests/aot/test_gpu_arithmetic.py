"""How many instructions of the ALU quantizing takes on H200, an element: kernels and XLA.

`docs/kernels.md` has the limits that follow.
"""

import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from pallas_kernels import exponential
from pallas_kernels._dispatch import Implementation
from pallas_kernels.quantize import quantize
from tests.aot.compiling import WHOLE, compile_for, disassembled, dumped
from tests.aot.test_gpu_instructions import OTHER, read

# Pipes of their own: multiplications and float additions, conversions, and what a warp shares.
ELSEWHERE = re.compile(r"IMAD|FADD|FMUL|FFMA|F2I|I2F|MUFU|FLO|U[A-Z]")
# In a hash this factor occurs once an element.
FACTOR = "0x7feb352d"

SIZE = 4 * WHOLE  # Mosaic writes the PTX of a program once, and other tests compile that of WHOLE.
FLOATS = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
HALVES = jax.ShapeDtypeStruct((SIZE,), jnp.bfloat16)
CODES = jax.ShapeDtypeStruct((SIZE,), jnp.uint8)
SCALE, SEEDS = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.uint32)
to_bytes = functools.partial(quantize, levels=127, bits=8)
to_powers = functools.partial(exponential.encode, headroom=3)
OPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "quantize": (to_bytes, (FLOATS, SCALE, SEEDS)),
    "quantize bfloat16": (to_bytes, (HALVES, SCALE, SEEDS)),
    "encode": (to_powers, (FLOATS, SCALE, SEEDS)),
    "add": (exponential.add, (CODES, CODES, SEEDS)),
}
MOST: dict[str, dict[Implementation, float]] = {
    "quantize": {"reference": 12, "mosaic_gpu": 13},
    "quantize bfloat16": {"reference": 12, "mosaic_gpu": 13},
    "encode": {"reference": 17, "mosaic_gpu": 17},
    "add": {"reference": 25, "mosaic_gpu": 26},
}


def alu_per_element(folder: pathlib.Path) -> float:
    """Of the kernel in `folder` that hashes."""
    (text,) = (text for text in disassembled(folder) if FACTOR in text)
    counted = [code for code in read(text).opcodes if not OTHER.match(code)]
    return sum(not ELSEWHERE.match(code) for code in counted) / text.count(FACTOR)


@pytest.mark.parametrize("name", ["reference", "mosaic_gpu"])
@pytest.mark.parametrize("op", OPS)
def test_budget(op: str, name: Implementation, h200: Mesh, machine_code: pathlib.Path) -> None:
    function, arguments = OPS[op]
    named = functools.partial(function, implementation=name)
    compile_for(h200, named, arguments, **dumped(machine_code))
    assert 8 < alu_per_element(machine_code) <= MOST[op][name]
