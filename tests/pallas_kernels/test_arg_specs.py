"""The table of workloads: every row can be traced, and every op that has kernels has a row."""

import importlib
import pathlib

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels.arg_specs import ROWS, Row, columns_for

PACKAGE = pathlib.Path(pallas_kernels.__path__[0])


@pytest.mark.quick(1)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_a_row_is_of_any_size(row: Row) -> None:
    traffic = [row.traffic(size) for size in (0, 1, 129, 2**20)]  # Traces it.
    assert traffic == sorted(traffic) and traffic[-1] >= 2**20


def test_every_op_has_a_row() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/reference.py")}
    assert {row.op.split(".")[0] for row in ROWS} == folders >= {"quantize", "pack"}


def test_labels_are_unique() -> None:
    assert len({row.label for row in ROWS}) == len(ROWS)


def test_kernels_of_a_row_exist() -> None:
    for row in ROWS:
        folder, function = row.op.split(".")
        for kernel in row.kernels:
            module = importlib.import_module(f"pallas_kernels.{folder}.{kernel}")
            assert callable(getattr(module, function))


def test_traffic_is_what_must_move() -> None:
    traffic = {row.label: row.traffic(4096) for row in ROWS}
    scalars = 4 + 8  # The scale and two seeds.
    assert traffic["quantize float32, 8 bits"] == (4 + 1) * 4096 + scalars
    assert traffic["quantize float32, 4 bits, residual"] == (4 + 0.5 + 4) * 4096 + scalars
    assert traffic["pack, 4 bits"] == 1.5 * 4096
    assert traffic["sketch tiles, encode float32"] == 3 * 4 * 4096 + 8 + 3 * 4 * 1024


def test_columns_are_what_tiles_take() -> None:
    assert [columns_for(2**b) for b in (0, 14, 15, 22, 28)] == [2**b for b in (10, 10, 11, 18, 18)]
    assert columns_for(2**28 - 1) == 2**18


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.op == "quantize.quantize"], ids=lambda row: row.label
)
def test_xla_quantizes_in_one_pass(row: Row) -> None:
    """Nothing of the size of the array is written beside the result."""
    arguments = jax.eval_shape(lambda: row.arguments(2**18))
    compiled = jax.jit(row.function(2**18, "reference")).lower(*arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 4096


def test_two_passes_would_be_seen() -> None:
    x = jax.ShapeDtypeStruct((2**18,), jnp.float32)
    compiled = jax.jit(lambda x: jnp.cumsum(jnp.sort(x))).lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes >= x.size
