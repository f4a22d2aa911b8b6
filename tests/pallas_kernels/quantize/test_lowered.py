"""Kernels of `quantize` and `dequantize`, lowered for devices that are not here."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.quantize import dequantize, quantize
from tests.pallas_kernels.lowering import CALLS, lowered
from tests.pallas_kernels.quantize.oracle import BY_WIDTH, Case
from tests.slow import slow

NAMES: dict[str, Any] = {"tpu": "mosaic_tpu", "cuda": "mosaic_gpu"}
SCALE, SEEDS = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.uint32)


def round_trip(
    x: jax.Array, scale: jax.Array, seeds: jax.Array, case: Case, implementation: Any
) -> tuple[jax.Array, jax.Array]:
    """Both kernels, with a residual and an accumulator."""
    options = {**case._asdict(), "implementation": implementation}
    codes, rest = quantize(x, scale, seeds, residual=True, **options)
    return dequantize(codes, scale, shape=x.shape, accumulate=jnp.ones(x.shape), **options), rest


def calls(platform: str, case: Case, shape: tuple[int, ...], dtype: Any = jnp.float32) -> int:
    f = functools.partial(round_trip, case=case, implementation=NAMES[platform])
    x = jax.ShapeDtypeStruct(shape, dtype)
    return lowered(f, x, SCALE, SEEDS, platform=platform).count(f"@{CALLS[platform]}")


@pytest.mark.slow
@pytest.mark.parametrize("platform", NAMES)
@pytest.mark.parametrize("case", BY_WIDTH, ids=str)
def test_every_width(platform: str, case: Case) -> None:
    assert calls(platform, case, (2**18 - 77,)) == 2


@pytest.mark.parametrize("platform", NAMES)
@pytest.mark.parametrize(
    "shape", [(256, 1152), *map(slow, [(), (1,), (129,), (2**31 - 1,)])], ids=str
)
def test_every_shape(platform: str, shape: tuple[int, ...]) -> None:
    assert calls(platform, Case(7, 4), shape, jnp.bfloat16) == 2
    assert calls(platform, Case(127, 8), shape) == 2


def test_the_gpu_counts_in_int32() -> None:
    with pytest.raises(NotImplementedError, match="int32"):
        calls("cuda", Case(127, 8), (2**31,))
