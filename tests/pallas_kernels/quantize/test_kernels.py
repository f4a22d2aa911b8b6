"""Kernels of `quantize` and `dequantize`, interpreted, against the reference."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantize import mosaic_gpu, mosaic_tpu, reference
from tests.pallas_kernels.lowering import INTERPRET_GPU, INTERPRET_TPU
from tests.pallas_kernels.quantize import oracle
from tests.pallas_kernels.quantize.oracle import CASES, Case
from tests.slow import slow

KERNELS = {"tpu": (mosaic_tpu, INTERPRET_TPU), "cuda": (mosaic_gpu, INTERPRET_GPU)}

SEEDS = jnp.array([2**32 - 7, 12345], jnp.uint32)


def assert_alike(actual: jax.Array, expected: jax.Array, bound: np.ndarray) -> None:
    """Within the bound, or the same NaN or infinity."""
    values, wanted = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    with np.errstate(all="ignore"):
        close = np.abs(values - wanted) <= bound
    assert (close | (values == wanted) | (np.isnan(values) & np.isnan(wanted))).all()


def assert_equal_to_reference(platform: str, case: Case, x: jax.Array, scale: float) -> None:
    """Codes bit for bit; floats within what contraction to a fused multiply-add changes."""
    kernels, interpret = KERNELS[platform]
    options = case._asdict()
    args = (x, jnp.float32(scale), SEEDS)
    quantize = functools.partial(kernels.quantize, **options, residual=True, interpret=interpret)
    codes, rest = jax.jit(quantize)(*args)
    expected, expected_rest = jax.jit(
        functools.partial(reference.quantize, **options, residual=True)
    )(*args)
    np.testing.assert_array_equal(codes, expected, strict=True)
    assert (rest.shape, rest.dtype) == (x.shape, x.dtype)
    wide = np.asarray(x, np.float64)
    narrowed = 0 if x.dtype == jnp.float32 else 2.0**-7 * np.abs(np.asarray(rest, np.float64))
    assert_alike(rest, expected_rest, 2.0**-22 * (np.abs(wide) + scale) + narrowed)

    options |= {"count": 1, "shape": x.shape}
    added = jnp.asarray(np.cos(np.arange(x.size, dtype=np.float32))).reshape(x.shape)
    dequantize = functools.partial(kernels.dequantize, **options, interpret=interpret)
    total = jax.jit(dequantize)(codes, args[1], added)
    expected = jax.jit(functools.partial(reference.dequantize, **options))(codes, args[1], added)
    assert (total.shape, total.dtype) == (x.shape, jnp.float32)
    assert_alike(total, expected, 2.0**-22 * (np.abs(np.asarray(added, np.float64)) + scale))


@pytest.mark.parametrize(
    ("platform", "case", "shape", "dtype"),
    [
        slow("tpu", Case(127, 8), (3, 128), jnp.float32),  # Less than a tile.
        ("tpu", Case(7, 4), (16 * 8, 256), jnp.bfloat16),  # As it lies in memory.
        slow("tpu", Case(15, 5), (7, 19), jnp.float32),
        slow("tpu", Case(2**20, 32), (), jnp.float32),
        slow("tpu", Case(100, 8), (360, 1152), jnp.float32),  # Blocks of both axes.
        slow("tpu", Case(127, 8), (140_000,), jnp.float32),  # A ragged last block.
        slow("cuda", Case(127, 8), (2, 1024), jnp.float32),
        ("cuda", Case(7, 4), (129,), jnp.bfloat16),  # Padded.
        slow("cuda", Case(1, 2), (16 * 512,), jnp.float32),
        slow("cuda", Case(127, 8), (1500,), jnp.float32),  # The last block has the rest.
        slow("cuda", Case(127, 8), (1536,), jnp.float32),
        slow("cuda", Case(15, 5), (6 * 1100 - 5,), jnp.float32),
    ],
    ids=str,
)
def test_layouts(platform: str, case: Case, shape: tuple[int, ...], dtype: Any) -> None:
    assert_equal_to_reference(platform, case, jnp.asarray(oracle.numbers(shape, 2.0), dtype), 2.0)


def test_blocks_of_the_view() -> None:
    assert mosaic_tpu._view((360, 1152), 8, mosaic_tpu.Config()).grid == (2, 3)
    assert mosaic_tpu._view((140_000,), 8, mosaic_tpu.Config()).grid == (2, 1)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="this JAX cannot interpret the view")
@pytest.mark.parametrize("shape", [(2**13,), slow((96, 256))])
def test_tpu_stores_bytes_as_words(shape: tuple[int, ...]) -> None:
    """JAX's general interpreter knows the view of bytes as words, which that of TPUs does not."""
    x = jnp.asarray(oracle.numbers(shape, 2.0))
    options: Any = {**Case(127, 8)._asdict(), "residual": False}
    (codes,) = mosaic_tpu.quantize(x, jnp.float32(2), SEEDS, **options, interpret=True)
    (expected,) = reference.quantize(x, jnp.float32(2), SEEDS, **options)
    np.testing.assert_array_equal(codes, expected, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_width(platform: str, case: Case) -> None:
    assert_equal_to_reference(platform, case, jnp.asarray(oracle.numbers((421,), 0.5)), 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("scale", [0.0, 2.0**-130, 2.0**-126, 2.0**-61, 3e38, np.inf])
def test_every_scale(platform: str, scale: float) -> None:
    x = jnp.asarray(oracle.numbers((130,), scale if 0 < scale < np.inf else 1.0))
    assert_equal_to_reference(platform, Case(127, 8), x, scale)
