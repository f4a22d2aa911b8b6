"""A config of a kernel changes its speed, never its result."""

import importlib
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels import _dispatch
from pallas_kernels._configs import Config, class_of
from pallas_kernels.arg_specs import ROWS, Row
from tests.pallas_kernels.workloads import PLATFORMS, check, interpreted, label, make_awkward
from tests.slow import slow

# Several blocks in some configs, fewer in others, of which the last is not full.
SIZES = {"mosaic_tpu": 70_003, "mosaic_gpu": 9_083}
LABELS = (
    "pack, 4 bits",
    "unpack, 2 bits",
    "exponential encode",
    "exponential decode",
    "exponential add",
    "quantize float32, 4 bits, residual",
    "dequantize, 4 bits, accumulate",
    "sketch tiles, encode float32",
    "block float float8_e4m3fn, blocks of 32",
)
COMPARED = [row for label in LABELS for row in ROWS if row.label == label]
OTHERS: dict[tuple[str, str], list[dict[str, int]]] = {
    ("pack", "mosaic_tpu"): [{"rows": 32}, {"rows": 4096}],
    ("pack", "mosaic_gpu"): [{"numbers": 8}, {"numbers": 32}],
    ("exponential", "mosaic_tpu"): [{"rows": 32}, {"rows": 96}],
    ("exponential", "mosaic_gpu"): [{"numbers": 4}, {"numbers": 32}],
    ("quantize", "mosaic_tpu"): [{"rows": 32, "columns": 128}, {"rows": 4096, "columns": 4096}],
    ("quantize", "mosaic_gpu"): [{"numbers": 4, "vector": 1}, {"numbers": 16, "vector": 8}],
    ("count_sketch", "mosaic_tpu"): [{"rows": 1, "unrolled": 24}, {"cells": 1024}],
    ("count_sketch", "mosaic_gpu"): [{"stages": 2}, {"stages": 16}],
    ("block_float", "mosaic_tpu"): [{"squares": 1}, {"squares": 3}],
    ("block_float", "mosaic_gpu"): [{"numbers": 16}, {"numbers": 32}],
}


def config_of(folder: str, kernel: str) -> type[Config]:
    module = importlib.import_module(f"pallas_kernels.{folder}.{kernel}")
    found: type[Config] = module.Config
    return found


@pytest.mark.parametrize(
    ("kernel", "row"),
    [
        (kernel, row) if row.label == LABELS[0] else slow(kernel, row)
        for kernel in PLATFORMS
        for row in COMPARED
        if kernel in row.kernels
    ],
    ids=label,
)
def test_a_config_changes_no_bit(kernel: Any, row: Row) -> None:
    """Of a result that is that of the reference."""
    folder, size = row.op.split(".")[0], SIZES[kernel]
    kind = config_of(folder, kernel)
    others = [kind.with_fields(np.float32, (*f.items(),)) for f in OTHERS[folder, kernel]]
    assert kind.of(np.float32) not in others
    arguments = tuple(map(make_awkward, row.arguments(size)))
    found = []
    for config in (None, *others):
        with interpreted(config):
            found.append(jax.tree.leaves(jax.jit(row.function(size, kernel))(*arguments)))
    check(row, found[0], jax.jit(row.function(size, "reference"))(*arguments))
    for a, *of_others in zip(*map(jax.device_get, found), strict=True):
        assert all((a.dtype, a.shape) == (b.dtype, b.shape) for b in of_others)
        assert all(a.tobytes() == b.tobytes() for b in of_others)


def load(op: str, kernel: str) -> Any:
    folder, function = op.split(".")
    return _dispatch.load(folder, kernel, function)


def test_every_function_with_a_config_is_compared() -> None:
    compared = {(row.op, kernel) for row in COMPARED for kernel in row.kernels}
    found = {
        (row.op, kernel)
        for row in ROWS
        for kernel in row.kernels
        if class_of(load(row.op, kernel), row.op.split(".")[0], kernel) is not Config
    }
    assert compared == found and {key[0].split(".")[0] for key in found} >= {"pack", "quantize"}


@pytest.mark.parametrize(("folder", "kernel"), OTHERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_candidates_are_few_and_the_assumption_is_first(
    folder: str, kernel: str, dtype: str
) -> None:
    kind = config_of(folder, kernel)
    candidates = kind.candidates(dtype)
    assert candidates[0] == kind.of(dtype)
    assert 2 <= len(set(candidates)) == len(candidates) <= 6
    for config in candidates:
        assert kind.with_fields(dtype, config.fields) == config and hash(config) is not None


WRONG: list[tuple[str, str, dict[str, Any], str]] = [
    ("pack", "mosaic_gpu", {"numbers": 3}, "`numbers` must be 4, 8, 16 or 32, got 3"),
    ("pack", "mosaic_tpu", {"rows": 33}, "`rows` must be a multiple of 32 in 32 to 4096"),
    ("quantize", "mosaic_gpu", {"numbers": 4, "vector": 8}, "`vector` .* `numbers`=4, got 8"),
    ("count_sketch", "mosaic_tpu", {"rows": 0}, "`rows` must be in 1 to 16, got 0"),
    ("block_float", "mosaic_gpu", {"vector": 8}, "`vector`=8 of float32 is more than the 16"),
    ("block_float", "mosaic_tpu", {"blocks": 2}, r"`blocks` is no field .*\['squares'\]"),
]


def test_wrong_fields() -> None:
    for folder, kernel, fields, words in WRONG:
        with pytest.raises(ValueError, match=words):
            config_of(folder, kernel).with_fields("float32", (*fields.items(),))
