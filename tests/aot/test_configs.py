"""Every config that tuning times compiles: its blocks fit in VMEM, its registers do not spill."""

import pathlib
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from pallas_kernels import _dispatch
from pallas_kernels._dispatch import Implementation
from pallas_kernels._measurements import Measured, use
from pallas_kernels.arg_specs import ROWS, Row
from pallas_kernels.benchmark.candidates import Session, Variant, variants
from tests.aot.compiling import WHOLE, compile_row, dumped, first_of_each_op
from tests.aot.test_gpu_kernels import check

H200, V5E = _dispatch.Device("cuda", "NVIDIA H200"), _dispatch.Device("tpu", "TPU v5 lite")


def cases(device: _dispatch.Device, kernel: Implementation) -> list[tuple[Row, Variant]]:
    """One row of each op, and the one with the most arrays, in all but the default config."""
    rows = first_of_each_op(kernel)
    rows += [row for row in ROWS if row.label == "feedback float32, 8 bits"]
    session = Session(device, 1, None, tune=True)
    return [
        (row, variant)
        for row in rows
        for variant in variants(row, session)[2:]
        if variant.name == kernel
    ]


def name(value: Row | Variant) -> str:
    return value.label if isinstance(value, Row) else value.described


def compiled_text(row: Row, variant: Variant, mesh: Mesh, **options: str) -> str:
    kernel: Any = variant.name
    with jax.set_mesh(mesh):
        kind = _dispatch.target().kind
    given = Measured(row.op, kind, 0, kernel, "", config=variant.config)
    with use((given,)):
        text: str = compile_row(row, WHOLE, mesh, kernel, **options).as_text()
    return text


@pytest.mark.parametrize(("row", "variant"), cases(V5E, "mosaic_tpu"), ids=name)
def test_on_tpu(row: Row, variant: Variant, chip: Mesh) -> None:
    assert "tpu_custom_call" in compiled_text(row, variant, chip)


@pytest.mark.parametrize(("row", "variant"), cases(H200, "mosaic_gpu"), ids=name)
def test_on_gpu(row: Row, variant: Variant, h200: Mesh, ptx: pathlib.Path) -> None:
    assert "mosaic_gpu" in compiled_text(row, variant, h200, **dumped(ptx))
    check(ptx, row.exact)
