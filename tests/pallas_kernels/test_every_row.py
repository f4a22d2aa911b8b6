"""Every row of the table of workloads: kernels are the reference, and are lowered for devices."""

from typing import Any

import jax
import pytest

from pallas_kernels import _gpu
from pallas_kernels._dispatch import Device, choose
from pallas_kernels.arg_specs import ROWS, Row
from tests.pallas_kernels.lowering import CALLS, KINDS, lowered, on
from tests.pallas_kernels.workloads import (
    EVERY,
    FIRST_OF_EACH_OP,
    PLATFORMS,
    check,
    check_in_a_mapped_scan,
    in_a_mapped_scan,
    interpreted,
    label,
    make_awkward,
)
from tests.slow import slow

KERNELS = [(row, name) for row, name in EVERY if name != "reference"]
# Those of sketches have tests of their own, of more shapes.
ELEMENTWISE = [(row, name) for row, name in KERNELS if "sketch" not in row.op]
# JAX cannot batch the seeds of a sketch on TPUs in a shard_map that checks types.
IN_BATCHES = [
    (row, name)
    for row, name in FIRST_OF_EACH_OP
    if ("sketch" in row.op, name) != (True, "mosaic_tpu")
]
QUICK = ("quantize.quantize", "pack.pack", "exponential.encode", "block_float.encode")


def some(pairs: list[Any], quick: tuple[str, ...]) -> list[Any]:
    """The first pair of these ops and each kernel is quick."""
    first = [pair for pair in FIRST_OF_EACH_OP if pair[0].op in quick]
    return [pair if pair in first else slow(*pair) for pair in pairs]


@pytest.mark.parametrize(("row", "name"), some(ELEMENTWISE, QUICK[:2]), ids=label)
def test_kernels_are_the_reference(row: Row, name: Any) -> None:
    for size in (0, 1, 421) if (row, name) in FIRST_OF_EACH_OP else (421,):
        arguments = tuple(map(make_awkward, row.arguments(size)))
        with interpreted():
            found = jax.jit(row.function(size, name))(*arguments)
        check(row, found, jax.jit(row.function(size, "reference"))(*arguments))


@pytest.mark.parametrize(("row", "name"), some(IN_BATCHES, QUICK[:1]), ids=label)
def test_inside_a_mapped_scan(row: Row, name: Any) -> None:
    with interpreted(in_batches=True):
        check_in_a_mapped_scan(row, name, 300, jax.devices()[0])


def is_refused(row: Row, name: str) -> bool:
    """JAX 0.10 cannot move the rows of this kernel."""
    return (row.op, name) == ("block_float.encode", "mosaic_gpu") and not _gpu.MOVES_ROWS


@pytest.mark.parametrize(("row", "name"), some(KERNELS, QUICK), ids=label)
def test_kernels_are_lowered(row: Row, name: Any) -> None:
    platform, size = PLATFORMS[name], 2**18 - 76
    types = jax.eval_shape(lambda: row.arguments(size))
    f = row.function(size, name)
    if is_refused(row, name):
        with pytest.raises(NotImplementedError, match=r"need JAX 0\.11"):
            lowered(f, *types, platform=platform)
        return
    assert lowered(f, *types, platform=platform).count(f"@{CALLS[platform]}") == 1
    if (row, name) in IN_BATCHES:
        stacked = [jax.ShapeDtypeStruct((4, 2, 3, *x.shape), x.dtype) for x in types]
        with on(platform, w=4) as mesh:
            traced = jax.jit(in_a_mapped_scan(f, mesh)).trace(stacked)
            text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count(f"@{CALLS[platform]}") == 1


def test_assumed_fastest_implementations() -> None:
    """No GPU takes an elementwise kernel by itself; no device one for unpacked codes."""
    one_product = {"dequantize, 8 bits", "dequantize, 8 bits, accumulate"}
    expected = {
        "tpu": {row.label for row in ROWS if row.kernels} - one_product,
        "cuda": {row.label for row in ROWS if row.kernels and "sketch" in row.op},
    }
    workloads = {row.label: row.workload(2**18) for row in ROWS if row.kernels}
    for platform, kind in KINDS.items():
        kernel = {"tpu": "mosaic_tpu", "cuda": "mosaic_gpu"}[platform]
        for size, of_size in ((2**18, expected[platform]), (2**15, set())):
            chosen = {
                name: choose(workload._replace(size=size), Device(platform, kind)).implementation
                for name, workload in workloads.items()
            }
            assert {name for name, taken in chosen.items() if taken == kernel} == of_size
