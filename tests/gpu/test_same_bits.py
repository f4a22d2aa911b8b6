"""What a GPU computes, by XLA and by the kernels, is what the reference computes on the CPU."""

import os
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels import _dispatch
from pallas_kernels._dispatch import Implementation
from pallas_kernels.arg_specs import ROWS, Row
from tests.pallas_kernels.workloads import (
    EVERY,
    FIRST_OF_EACH_OP,
    check,
    check_in_a_mapped_scan,
    label,
    make_awkward,
)

REHEARSE = bool(os.environ.get("JAXCOMM_REHEARSE"))  # On a CPU, in the interpreter.
SIZES = [129, 1000] if REHEARSE else [1, 127, 129, 1000, 65_537, 2**20, 3_000_001]
LARGE = 2**11 if REHEARSE else 2**20


def of_gpus(pairs: list[Any]) -> list[Any]:
    return [pair for pair in pairs if pair[1] != "mosaic_tpu"]


def expected(row: Row, size: int, cpu: jax.Device) -> tuple[tuple[jax.Array, ...], Any]:
    """Arguments, and what the reference on the CPU makes of them."""
    with jax.default_device(cpu):
        arguments = tuple(map(make_awkward, row.arguments(size)))
        return arguments, jax.jit(row.function(size, "reference"))(*arguments)


def require_hopper(implementation: Implementation, gpu: jax.Device) -> None:
    platform = "cpu" if REHEARSE else "cuda"
    reason = _dispatch.reason_against(implementation, _dispatch.Device(platform, gpu.device_kind))
    if reason:
        pytest.skip(f"no GPU of that kind: {reason}")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("row", "implementation"), of_gpus(EVERY), ids=label)
def test_every_size(
    row: Row, implementation: Implementation, size: int, cpu: jax.Device, gpu: jax.Device
) -> None:
    require_hopper(implementation, gpu)
    arguments, wanted = expected(row, size, cpu)
    check(row, jax.jit(row.function(size, implementation))(*jax.device_put(arguments, gpu)), wanted)


@pytest.mark.parametrize(("row", "implementation"), of_gpus(FIRST_OF_EACH_OP), ids=label)
def test_inside_a_mapped_scan(row: Row, implementation: Implementation, gpu: jax.Device) -> None:
    require_hopper(implementation, gpu)
    check_in_a_mapped_scan(row, implementation, 5000, gpu)


def test_the_choice_for_this_device_is_right_too(cpu: jax.Device, gpu: jax.Device) -> None:
    for row in ROWS:
        arguments, wanted = expected(row, LARGE, cpu)
        check(row, jax.jit(row.function(LARGE, None))(*jax.device_put(arguments, gpu)), wanted)


def test_buffers_can_be_donated(gpu: jax.Device) -> None:
    row = next(row for row in ROWS if row.label == "dequantize, 8 bits, accumulate")
    codes, scale, total = jax.device_put(row.arguments(LARGE), gpu)
    wanted = jax.jit(row.function(LARGE, None))(codes, scale, total)
    given = jax.jit(row.function(LARGE, None), donate_argnums=2)(codes, scale, total)
    np.testing.assert_array_equal(given, wanted)
    assert total.is_deleted()
