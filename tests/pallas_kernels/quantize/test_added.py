"""`quantize(added=)`: error feedback in one pass, in every layout and implementation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantize import mosaic_gpu, mosaic_tpu, quantize, reference
from tests.pallas_kernels.lowering import CALLS, INTERPRET_GPU, INTERPRET_TPU, lowered
from tests.pallas_kernels.quantize import oracle
from tests.pallas_kernels.quantize.oracle import Case
from tests.slow import slow

KERNELS = {"tpu": (mosaic_tpu, INTERPRET_TPU), "cuda": (mosaic_gpu, INTERPRET_GPU)}
SEEDS = np.array([2**32 - 7, 12345], np.uint32)
CASES = [Case(127, 8), Case(7, 4), Case(1, 2)]


def terms(size: int, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    """An update, and a residual of smaller numbers."""
    generator = np.random.default_rng(size)
    x = generator.normal(size=size).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(generator.normal(size=size) / 8, dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, slow(jnp.bfloat16)])
def test_the_sum_is_quantized_and_the_rest_is_kept(case: Case, dtype: Any) -> None:
    x, kept = terms(203, dtype)
    y = np.asarray(x) + np.asarray(kept, np.float32)
    scale, divisor = np.float32(np.abs(y).max()), 1.5
    fields, rest = jax.jit(
        functools.partial(quantize, **case._asdict(), residual=True, divisor=divisor)
    )(x, jnp.float32(scale), jnp.asarray(SEEDS), added=kept)
    codes = oracle.codes_of(y, scale, SEEDS, case.levels)
    np.testing.assert_array_equal(fields, oracle.fields_of(codes, case))
    exact = y.astype(np.float64) - codes * (np.float64(scale) / case.levels) / divisor
    assert rest.dtype == dtype
    precision = 2.0**-21 if dtype == jnp.float32 else 2.0**-8
    assert np.abs(np.asarray(rest, np.float64) - exact).max() <= precision * scale


@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize(
    ("case", "size", "dtype"),
    [
        (Case(7, 4), 1000, jnp.float32),
        slow(Case(127, 8), 1536, jnp.bfloat16),
        slow(Case(1, 2), 129, jnp.float32),
    ],
)
def test_kernels(platform: str, case: Case, size: int, dtype: Any) -> None:
    kernels, interpret = KERNELS[platform]
    options = {**case._asdict(), "residual": True, "divisor": 1.25}
    arguments = (terms(size)[0], jnp.float32(4), jnp.asarray(SEEDS), terms(size, dtype)[1])
    codes, rest = jax.jit(functools.partial(kernels.quantize, **options, interpret=interpret))(
        *arguments
    )
    expected, expected_rest = jax.jit(functools.partial(reference.quantize, **options))(*arguments)
    np.testing.assert_array_equal(codes, expected)
    assert rest.dtype == expected_rest.dtype == dtype
    bound = 2.0**-20 if dtype == jnp.float32 else 2.0**-6
    np.testing.assert_allclose(rest, expected_rest, rtol=0, atol=bound)


@pytest.mark.parametrize("platform", KERNELS)
def test_the_kernel_is_lowered(platform: str) -> None:
    x, scale = jax.ShapeDtypeStruct((2**17,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    seeds = jax.ShapeDtypeStruct((2,), jnp.uint32)
    name: Any = {"tpu": "mosaic_tpu", "cuda": "mosaic_gpu"}[platform]

    def f(x: jax.Array, scale: jax.Array, seeds: jax.Array) -> Any:
        return quantize(
            x, scale, seeds, levels=7, bits=4, residual=True, added=x, implementation=name
        )

    assert CALLS[platform] in lowered(f, x, scale, seeds, platform=platform)


def test_wrong_arguments() -> None:
    x, kept = terms(8)
    options = {"levels": 7, "bits": 8, "residual": True}
    scale, seeds = jnp.float32(4), jnp.asarray(SEEDS)
    with pytest.raises(ValueError, match=r"`added` must be float32 or bfloat16 \[8\], got"):
        quantize(x, scale, seeds, added=kept[:3], **options)
    with pytest.raises(ValueError, match="`divisor` must be positive, got 0"):
        quantize(x, scale, seeds, added=kept, divisor=0.0, **options)
    with pytest.raises(TypeError, match="`quantize` rounds"):
        jax.grad(lambda kept: quantize(x, scale, seeds, added=kept, **options)[1].sum())(kept)
