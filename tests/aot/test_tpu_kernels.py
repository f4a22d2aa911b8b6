"""Every kernel compiles for TPU, which proves that its blocks fit in VMEM."""

import pytest
from jax.sharding import Mesh

from pallas_kernels.arg_specs import ROWS, Row
from tests.aot.compiling import RAGGED, WHOLE, compile_row, first_of_each_op, temporary_bytes

KERNELS = [row for row in ROWS if "mosaic_tpu" in row.kernels]


@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.label)
def test_kernels_need_at_most_the_stated_memory(row: Row, chip: Mesh) -> None:
    compiled = compile_row(row, WHOLE, chip, "mosaic_tpu")
    assert "tpu_custom_call" in compiled.as_text()
    assert temporary_bytes(compiled) <= row.temporaries


@pytest.mark.parametrize("row", first_of_each_op("mosaic_tpu"), ids=lambda row: row.label)
def test_padding_costs_at_most_a_copy(row: Row, chip: Mesh) -> None:
    compiled = compile_row(row, RAGGED, chip, "mosaic_tpu")
    assert temporary_bytes(compiled) <= 1.5 * row.traffic(RAGGED)


def test_by_default_only_large_arrays_use_the_kernel(chip: Mesh) -> None:
    taken = {
        size: "tpu_custom_call" in compile_row(KERNELS[0], size, chip, None).as_text()
        for size in (1000, WHOLE)
    }
    assert taken == {1000: False, WHOLE: True}
