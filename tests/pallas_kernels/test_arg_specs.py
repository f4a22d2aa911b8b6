"""The table of workloads: every row can be traced, and every op that has kernels has a row."""

import pathlib

import jax
import pytest

import pallas_kernels
from pallas_kernels import _dispatch
from pallas_kernels.arg_specs import ROWS, Row
from tests.pallas_kernels.workloads import EVERY, label
from tests.slow import slow

PACKAGE = pathlib.Path(pallas_kernels.__path__[0])


def test_every_op_has_a_row() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/reference.py")}
    assert {row.op.split(".")[0] for row in ROWS} == folders >= {"quantize", "pack"}


def test_labels_are_unique_and_kernels_exist() -> None:
    assert len({row.label for row in ROWS}) == len(ROWS)
    for row, name in EVERY:
        folder, function = row.op.split(".")
        assert callable(_dispatch.load(folder, name, function))


def test_traffic_is_what_must_move() -> None:
    traffic = {row.label: row.traffic(4096) for row in ROWS}
    scalars = 4 + 8  # The scale and two seeds.
    assert traffic["quantize float32, 8 bits"] == (4 + 1) * 4096 + scalars
    assert traffic["quantize float32, 4 bits, residual"] == (4 + 0.5 + 4) * 4096 + scalars
    assert traffic["pack, 4 bits"] == 1.5 * 4096
    assert traffic["sketch tiles, encode float32"] == 3 * 4 * 4096 + 8 + 3 * 4 * 1024


QUANTIZERS = [row for row in ROWS if row.op == "quantize.quantize"]


@pytest.mark.parametrize("row", [QUANTIZERS[0], *map(slow, QUANTIZERS[1:])], ids=label)
def test_xla_quantizes_in_one_pass(row: Row) -> None:
    """Nothing of the size of the array is written beside the result."""
    arguments = jax.eval_shape(lambda: row.arguments(2**18))
    compiled = jax.jit(row.function(2**18, "reference")).lower(*arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 4096
