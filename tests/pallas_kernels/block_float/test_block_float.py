"""`block_float`: the reference against NumPy, its kernel against the reference."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _gpu, block_float
from pallas_kernels.block_float import mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.block_float.reference import FORMATS
from tests.pallas_kernels.block_float import oracle
from tests.pallas_kernels.lowering import CALLS, INTERPRET_GPU, INTERPRET_TPU, lowered
from tests.slow import slow

SEEDS = np.array([2**32 - 7, 12345], np.uint32)
KERNELS = {
    "tpu": functools.partial(mosaic_tpu.encode, interpret=INTERPRET_TPU),
    "cuda": functools.partial(mosaic_gpu.encode, interpret=INTERPRET_GPU),
}
WAYS = [
    (dtype, block_size, stochastic)
    if stochastic and size == block_size
    else slow(dtype, block_size, stochastic)
    for dtype, size in zip(FORMATS, (256, 32, 32), strict=True)
    for block_size in (32, 256)
    for stochastic in (False, True)
]


def numbers(size: int) -> np.ndarray:
    """Blocks of many magnitudes, with what is special."""
    generator = np.random.default_rng(size)
    x = generator.normal(size=size) * np.exp2(-generator.integers(0, 30, size) // 2.0)
    x *= np.exp2(np.repeat(generator.integers(-90, 90, size // 32 + 1), 32)[:size])
    x = x.astype(np.float32)
    if size >= 5000:
        x[:300] = 0  # A whole block, of 256 too.
        x[320:330] = [np.inf, 1, 1e-40, 2.0**-126, -0.0, 3.4e38, -np.inf, 1, 2, np.nan]
        x[1024:1030] = [448.0, -448.0, 0.5, 1.5, 2.5, 2.0**-9]  # The largest number, and ties.
        x[1030:1280] = 0
        x[2048:2304] = 2.0**-120  # Below the least scale.
        x[2048] = 3e-38
        x[2560:2563] = [127.0, -126.5, 0.5]
        x[2563:2816] = 2.0**-140
        x[3072:3328] = np.finfo(np.float32).max
    return x


def as_bytes(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize(("dtype", "block_size", "stochastic"), WAYS)
def test_the_reference_is_the_oracle(dtype: Any, block_size: int, stochastic: bool) -> None:
    seeds = SEEDS if stochastic else None
    encode = jax.jit(
        lambda x: block_float.encode(
            x, None if seeds is None else jnp.asarray(seeds), dtype=dtype, block_size=block_size
        )
    )
    x = numbers(5003)
    elements, exponents = encode(jnp.asarray(x))
    expected = oracle.encode(x, seeds, dtype, block_size)
    np.testing.assert_array_equal(exponents, expected[1])
    # The sign of zero is that of x, which NumPy loses where it multiplies.
    np.testing.assert_array_equal(
        np.asarray(elements).astype(np.float32), expected[0].astype(np.float32)
    )
    decoded = block_float.decode(elements, exponents, block_size=block_size)
    exact = oracle.decode(*expected, block_size)
    normal = np.isnan(exact) | (np.abs(exact) >= 2.0**-126) | (exact == 0)
    np.testing.assert_array_equal(decoded[normal], exact.astype(np.float32)[normal])


@pytest.mark.parametrize("shape", [(3, 5, 7), *map(slow, [(), (0,), (1,)])], ids=str)
def test_shapes_and_dtypes(shape: tuple[int, ...]) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.bfloat16)
    elements, exponents = block_float.encode(x, jnp.asarray(SEEDS))
    wide = block_float.encode(x.astype(jnp.float32), jnp.asarray(SEEDS))
    assert elements.dtype == jnp.float8_e4m3fn and elements.shape == shape
    assert exponents.dtype == jnp.uint8 and exponents.shape == (-(-x.size // 32),)
    np.testing.assert_array_equal(as_bytes(elements), as_bytes(wide[0]))
    assert block_float.decode(elements, exponents).shape == shape


@pytest.mark.parametrize("dtype", FORMATS)
def test_nearest_is_within_the_bound(dtype: Any) -> None:
    """At the input with the largest error: a half of a step everywhere, the peak above half."""
    form, size = FORMATS[dtype], 32
    step = 2.0 ** (form.least - form.mantissa)
    x = np.full(size, step / 2, np.float32)
    x[0] = form.largest / 2 + (1 if form.is_integer else step)
    decoded = block_float.decode(*block_float.encode(jnp.asarray(x), None, dtype=dtype))
    error = np.square(np.asarray(decoded) - x).sum() / np.square(x).sum()
    assert error <= form.error(size)


def assert_equal_to_reference(
    encode: Any, size: int, dtype: str, block_size: int, stochastic: bool, of: str = "float32"
) -> None:
    options = {"dtype": dtype, "block_size": block_size, "stochastic": stochastic}
    x, seeds = jnp.asarray(numbers(size)).astype(of), jnp.asarray(SEEDS)
    elements, exponents = jax.jit(functools.partial(encode, **options))(x, seeds)
    expected = reference.encode(x, seeds, **options)
    assert elements.dtype == expected[0].dtype
    np.testing.assert_array_equal(as_bytes(elements), as_bytes(expected[0]))
    np.testing.assert_array_equal(exponents, expected[1])


# Sizes of whole blocks of threads, of a last one with the rest, and of padded arrays.
@pytest.mark.parametrize(
    ("dtype", "block_size", "stochastic", "size"),
    [
        ("float8_e4m3fn", 32, True, 5003),
        slow("float8_e5m2", 32, True, 20_000),
        slow("int8", 256, True, 5003),
        slow("float8_e4m3fn", 1024, False, 5003),
        slow("int8", 128, True, 10_240),
        slow("float8_e5m2", 64, False, 129),
        slow("int8", 32, False, 1),
        slow("float8_e4m3fn", 512, True, 16_384 * 9),
    ],
)
@pytest.mark.parametrize("platform", ["tpu", slow("cuda")])
def test_kernels_are_the_reference(
    platform: str, dtype: str, block_size: int, stochastic: bool, size: int
) -> None:
    assert_equal_to_reference(KERNELS[platform], size, dtype, block_size, stochastic)


@pytest.mark.slow
@pytest.mark.parametrize("config", [mosaic_gpu.Config(8, n) for n in (8, 16)], ids=str)
@pytest.mark.parametrize("block_size", [32, 1024])
def test_16_bytes_of_bfloat16_at_once(config: Any, block_size: int) -> None:
    """What `test_configs` cannot compare, since float32 takes half as many."""
    encode = functools.partial(KERNELS["cuda"], config=config)
    assert_equal_to_reference(encode, 20_003, "float8_e4m3fn", block_size, True, "bfloat16")


@pytest.mark.slow
@pytest.mark.skipif(not _gpu.MOVES_ROWS, reason="this JAX has no such kernel")
@pytest.mark.parametrize("block_size", [32, 64, 256, 1024])
@pytest.mark.parametrize("vector", [4, 8])
def test_every_layout_is_lowered(vector: int, block_size: int) -> None:
    options: dict[str, Any] = {"dtype": "int8", "block_size": block_size, "stochastic": True}
    seeds = jax.ShapeDtypeStruct((2,), jnp.uint32)
    x = jax.ShapeDtypeStruct((2**17 - 77,), jnp.bfloat16)
    for numbers in (8, 32):
        config = mosaic_gpu.Config(vector, numbers)
        encode = functools.partial(mosaic_gpu.encode, **options, config=config)
        assert CALLS["cuda"] in lowered(encode, x, seeds, platform="cuda")


@pytest.mark.parametrize(
    ("rows", "block_size"),
    [(33, 32), *(slow(rows, 32) for rows in (1, 31, 32, 65, 127)), slow(13, 1024)],
)
def test_no_two_blocks_of_threads_write_the_same_number(rows: int, block_size: int) -> None:
    """32 rows of 32 numbers fill a block of threads, or 4 of 1024. Races are errors."""
    for size in (rows * block_size, rows * block_size - 5):
        assert_equal_to_reference(KERNELS["cuda"], size, "int8", block_size, True)
