"""Kernels of `quantize` and `dequantize`, interpreted, against the reference."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantize import dequantize, mosaic_tpu, quantize, reference
from tests.pallas_kernels.quantize import oracle
from tests.pallas_kernels.quantize.oracle import CASES, Case
from tests.pallas_kernels.workloads import interpreted
from tests.slow import slow

KERNELS: tuple[Any, ...] = ("mosaic_tpu", "mosaic_gpu")
SEEDS = jnp.array([2**32 - 7, 12345], jnp.uint32)


def assert_equal_to_reference(kernel: Any, case: Case, x: jax.Array, scale: float) -> None:
    """Codes bit for bit; floats within what contraction to a fused multiply-add changes."""
    added = jnp.asarray(np.cos(np.arange(x.size, dtype=np.float32))).reshape(x.shape)

    def both_ways(name: Any) -> Any:
        def run(x: jax.Array, scale: jax.Array, added: jax.Array) -> Any:
            options = {**case._asdict(), "implementation": name}
            codes, rest = quantize(x, scale, SEEDS, residual=True, **options)
            total = dequantize(codes, scale, shape=x.shape, accumulate=added, **options)
            return codes, rest, total

        return jax.jit(run)(x, jnp.float32(scale), added)

    with interpreted():
        codes, rest, total = both_ways(kernel)
    expected, expected_rest, expected_total = both_ways("reference")
    np.testing.assert_array_equal(codes, expected, strict=True)
    narrowed = 0 if x.dtype == jnp.float32 else 2.0**-7
    for found, other, given in ((rest, expected_rest, x), (total, expected_total, added)):
        assert (found.shape, found.dtype) == (given.shape, given.dtype)
        found, other, given = (np.asarray(each, np.float64) for each in (found, other, given))
        with np.errstate(invalid="ignore"):
            bound = 2.0**-22 * (np.abs(given) + scale) + narrowed * np.abs(found)
        bound = np.where(np.isfinite(bound), bound, 0)  # There, NaN or the same infinity.
        assert np.isclose(found, other, rtol=0, atol=bound, equal_nan=True).all()


@pytest.mark.parametrize(
    ("kernel", "case", "shape", "dtype"),
    [
        slow("mosaic_tpu", Case(127, 8), (3, 128), jnp.float32),  # Less than a tile.
        ("mosaic_tpu", Case(7, 4), (16 * 8, 256), jnp.bfloat16),  # As it lies in memory.
        slow("mosaic_tpu", Case(15, 5), (7, 19), jnp.float32),
        slow("mosaic_tpu", Case(2**20, 32), (), jnp.float32),
        slow("mosaic_tpu", Case(100, 8), (360, 1152), jnp.float32),  # Blocks of both axes.
        slow("mosaic_tpu", Case(127, 8), (140_000,), jnp.float32),  # A ragged last block.
        slow("mosaic_gpu", Case(127, 8), (2, 1024), jnp.float32),
        ("mosaic_gpu", Case(7, 4), (129,), jnp.bfloat16),  # Padded.
        slow("mosaic_gpu", Case(1, 2), (16 * 512,), jnp.float32),
        slow("mosaic_gpu", Case(127, 8), (1500,), jnp.float32),  # The last block has the rest.
        slow("mosaic_gpu", Case(127, 8), (1536,), jnp.float32),
        slow("mosaic_gpu", Case(15, 5), (6 * 1100 - 5,), jnp.float32),
    ],
    ids=str,
)
def test_layouts(kernel: str, case: Case, shape: tuple[int, ...], dtype: Any) -> None:
    assert_equal_to_reference(kernel, case, jnp.asarray(oracle.numbers(shape, 2.0), dtype), 2.0)


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


SCALES = [0.0, 2.0**-130, 2.0**-126, 2.0**-61, 3e38, np.inf]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("case", "scale"),
    [*((case, 0.5) for case in CASES), *((Case(127, 8), scale) for scale in SCALES)],
    ids=str,
)
def test_every_width_and_scale(kernel: str, case: Case, scale: float) -> None:
    x = jnp.asarray(oracle.numbers((421,), scale if 0 < scale < np.inf else 1.0))
    assert_equal_to_reference(kernel, case, x, scale)
