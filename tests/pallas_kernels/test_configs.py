"""A config of a kernel changes its speed, never its result."""

import functools
import importlib
import inspect
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels import _dispatch
from pallas_kernels._configs import Config
from pallas_kernels._gpu import gpu_interpret_params
from pallas_kernels.arg_specs import ROWS, Row
from tests.pallas_kernels.lowering import INTERPRET_GPU, INTERPRET_TPU

INTERPRET = {"mosaic_tpu": INTERPRET_TPU, "mosaic_gpu": INTERPRET_GPU}
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


def result(row: Row, kernel: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the kernel, interpreted, returns."""

    interpret, load_kernel = INTERPRET[kernel], _dispatch.load
    if (row.op, kernel) == ("block_float.encode", "mosaic_gpu"):
        interpret = gpu_interpret_params()  # The last block writes numbers of the one before again.

    def load(folder: str, name: str, function: str) -> Any:
        found = load_kernel(folder, name, function)
        return functools.partial(found, config=config, interpret=interpret)

    arguments = row.arguments(SIZES[kernel])
    monkeypatch.setattr(_dispatch, "load", load)
    monkeypatch.setattr(_dispatch, "reason_against", lambda *_: None)
    found = jax.jit(row.function(SIZES[kernel], kernel))(*arguments)
    monkeypatch.undo()
    return found


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("kernel", "row"),
    [(kernel, row) for kernel in INTERPRET for row in COMPARED if kernel in row.kernels],
    ids=lambda value: getattr(value, "label", value),
)
def test_a_config_changes_no_bit(kernel: str, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = row.op.split(".")[0]
    kind = config_of(folder, kernel)
    expected = jax.tree.leaves(result(row, kernel, None, monkeypatch))
    for fields in OTHERS[folder, kernel]:
        config = kind.with_fields(np.float32, tuple(fields.items()))
        assert config != kind.of(np.float32)
        found = jax.tree.leaves(result(row, kernel, config, monkeypatch))
        for a, b in zip(found, expected, strict=True):
            a, b = np.asarray(a), np.asarray(b)
            assert (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()


def test_every_function_with_a_config_is_compared() -> None:
    compared = {(row.op, kernel) for row in COMPARED for kernel in row.kernels}
    found = set()
    for row in ROWS:
        folder, function = row.op.split(".")
        for kernel in row.kernels:
            loaded = _dispatch.load(folder, kernel, function)
            if "config" in inspect.signature(loaded).parameters:
                found.add((row.op, kernel))
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


@pytest.mark.parametrize(
    ("folder", "kernel", "fields", "words"),
    [
        ("pack", "mosaic_gpu", {"numbers": 3}, "`numbers` must be 4, 8, 16 or 32, got 3"),
        ("pack", "mosaic_tpu", {"rows": 33}, "`rows` must be a multiple of 32 in 32 to 4096"),
        ("pack", "mosaic_tpu", {"rows": 64.0}, "`rows` must be .*, got 64.0"),
        ("exponential", "mosaic_tpu", {"rows": 8192}, "`rows` must be .*, got 8192"),
        ("quantize", "mosaic_gpu", {"vector": 3}, "`vector` must be 1, 2, 4 or 8, got 3"),
        ("quantize", "mosaic_gpu", {"numbers": 4, "vector": 8}, "`vector` .* `numbers`=4, got 8"),
        ("quantize", "mosaic_gpu", {"vector": True}, "`vector` must be .*, got True"),
        ("quantize", "mosaic_tpu", {"columns": 100}, "`columns` must be a multiple of 128"),
        ("count_sketch", "mosaic_gpu", {"stages": 3}, "`stages` must be 2, 4, 8 or 16, got 3"),
        ("count_sketch", "mosaic_tpu", {"rows": 0}, "`rows` must be in 1 to 16, got 0"),
        ("count_sketch", "mosaic_tpu", {"cells": 1}, "`cells` must be a multiple of 1024"),
        ("count_sketch", "mosaic_tpu", {"unrolled": 4}, "`unrolled` must be in 8 to 128, got 4"),
        ("block_float", "mosaic_gpu", {"vector": 8}, "`vector`=8 of float32 is more than the 16"),
        ("block_float", "mosaic_tpu", {"blocks": 2}, r"`blocks` is no field .*\['squares'\]"),
    ],
)
def test_wrong_fields(folder: str, kernel: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_of(folder, kernel).with_fields("float32", tuple(fields.items()))
