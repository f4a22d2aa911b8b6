"""`block_float`: the reference against NumPy, its kernel against the reference."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import _gpu, block_float, implementation
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
    pytest.param(
        dtype, block_size, stochastic, id=f"{dtype}-{block_size}-{stochastic}", marks=marks
    )
    for dtype in FORMATS
    for block_size in (32, 256)
    for stochastic in (False, True)
    for marks in ([] if (block_size == 32) == (dtype != "int8") else [pytest.mark.slow],)
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


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", [(3, 5, 7), (), (0,), (1,)], ids=str)
def test_shapes_and_dtypes(shape: tuple[int, ...]) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.bfloat16)
    elements, exponents = block_float.encode(x, jnp.asarray(SEEDS))
    wide = block_float.encode(x.astype(jnp.float32), jnp.asarray(SEEDS))
    assert elements.dtype == jnp.float8_e4m3fn and elements.shape == shape
    assert exponents.dtype == jnp.uint8 and exponents.shape == (-(-x.size // 32),)
    np.testing.assert_array_equal(as_bytes(elements), as_bytes(wide[0]))
    assert block_float.decode(elements, exponents).shape == shape


@pytest.mark.parametrize("dtype", ["int8", slow("float8_e4m3fn"), slow("float8_e5m2")])
def test_unbiased_within_the_bound(dtype: Any) -> None:
    """Of normal numbers and of one that is far below the largest."""
    draws = 4000
    x = np.random.default_rng(1).normal(size=64).astype(np.float32)
    x[5] = 1e-4
    seeds = np.random.default_rng(2).integers(0, 2**32, (draws, 2), np.uint32)

    def draw(seeds: jax.Array) -> jax.Array:
        return block_float.decode(*block_float.encode(jnp.asarray(x), seeds, dtype=dtype))

    samples = np.asarray(jax.jit(jax.vmap(draw))(jnp.asarray(seeds)), np.float64)
    form = FORMATS[dtype]
    step = np.abs(x).max() / 63 if form.is_integer else np.abs(x) * 2.0**-form.mantissa
    # A number just beside a level may never leave it: ten draws that do are within chance.
    slack = 5 * samples.std(axis=0) / draws**0.5 + 10 * step / draws
    assert (np.abs(samples.mean(axis=0) - x) < slack).all()
    omega = form.error(32)
    assert 0.01 * omega < np.square(samples - x).sum(axis=1).mean() / np.sum(x**2) < omega


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


@pytest.mark.quick(1)
@pytest.mark.parametrize(("dtype", "block_size", "stochastic"), WAYS)
@pytest.mark.parametrize("size", [20_000, slow(1), slow(129), slow(16_384 * 9)])
def test_the_tpu_kernel_is_the_reference(
    dtype: str, block_size: int, stochastic: bool, size: int
) -> None:
    assert_equal_to_reference(KERNELS["tpu"], size, dtype, block_size, stochastic)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("block_size", [32, 64, 128, 256, 512, 1024])
@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("size", [10_240, 5003, 0, 1, 129])
def test_the_gpu_kernel_is_the_reference(
    dtype: str, block_size: int, stochastic: bool, size: int
) -> None:
    """Of whole blocks of threads, of a last one with the rest, and of padded arrays."""
    assert_equal_to_reference(KERNELS["cuda"], size, dtype, block_size, stochastic)


CONFIGS = {
    "tpu": [mosaic_tpu.Config(squares) for squares in (1, 3, 16)],
    "cuda": [mosaic_gpu.Config(v, n) for v in (4, 8) for n in (8, 16, 32)],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "config"), [(p, c) for p, configs in CONFIGS.items() for c in configs], ids=str
)
@pytest.mark.parametrize("block_size", [32, 128, 1024])
def test_a_config_changes_no_result(platform: str, config: Any, block_size: int) -> None:
    encode = functools.partial(KERNELS[platform], config=config)
    of = "bfloat16" if getattr(config, "vector", 4) == 8 else "float32"
    assert_equal_to_reference(encode, 20_003, "float8_e4m3fn", block_size, True, of)


@pytest.mark.slow
@pytest.mark.skipif(not _gpu.MOVES_ROWS, reason="this JAX has no such kernel")
@pytest.mark.parametrize("config", CONFIGS["cuda"], ids=str)
@pytest.mark.parametrize("block_size", [32, 1024])
def test_every_config_is_lowered(config: mosaic_gpu.Config, block_size: int) -> None:
    options: dict[str, Any] = {"dtype": "int8", "block_size": block_size, "stochastic": True}
    encode = functools.partial(mosaic_gpu.encode, **options, config=config)
    seeds = jax.ShapeDtypeStruct((2,), jnp.uint32)
    for dtype in (jnp.bfloat16,) if config.vector == 8 else (jnp.bfloat16, jnp.float32):
        x = jax.ShapeDtypeStruct((2**17,), dtype)
        assert CALLS["cuda"] in lowered(encode, x, seeds, platform="cuda")


def test_wrong_configs() -> None:
    with pytest.raises(ValueError, match="`vector` must be 4 or 8, got 3"):
        mosaic_gpu.Config(3, 8)
    with pytest.raises(ValueError, match="`numbers` must be 8, 16 or 32, got 4"):
        mosaic_gpu.Config(4, 4)
    with pytest.raises(ValueError, match="`squares` must be in 1 to 16, got 0"):
        mosaic_tpu.Config(0)
    with pytest.raises(ValueError, match="`vector`=8 of float32 is more than the 16 bytes"):
        KERNELS["cuda"](
            jnp.ones(3),
            jnp.asarray(SEEDS),
            dtype="int8",
            block_size=32,
            stochastic=True,
            config=mosaic_gpu.Config(8, 8),
        )


@pytest.mark.parametrize(
    ("rows", "block_size"),
    [(33, 32), *(slow(rows, 32) for rows in (1, 31, 32, 63, 64, 65, 96, 127)), slow(13, 1024)],
)
def test_no_two_blocks_of_threads_write_the_same_number(rows: int, block_size: int) -> None:
    """32 rows of 32 numbers fill a block of threads, or 4 of 1024. Races are errors."""
    for size in (rows * block_size, rows * block_size - 5):
        assert_equal_to_reference(KERNELS["cuda"], size, "int8", block_size, True)


@pytest.mark.parametrize("platform", ["tpu", slow("cuda")])
def test_the_kernel_widens_bfloat16(platform: str) -> None:
    x, seeds = jnp.asarray(numbers(5003)).astype(jnp.bfloat16), jnp.asarray(SEEDS)
    options = {"dtype": "int8", "block_size": 64, "stochastic": True}
    found = KERNELS[platform](x, seeds, **options)
    for a, b in zip(found, reference.encode(x, seeds, **options), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("platform", "size"), [("tpu", 300), slow("cuda", 300), slow("cuda", 1100)]
)
def test_the_kernel_in_a_checked_shard_map_and_a_loop(platform: str, size: int) -> None:
    mesh = jax.make_mesh((2,), ("w",), axis_types=(AxisType.Auto,))
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 2, size)), jnp.float32)

    def worker(encode: Any) -> Any:
        def run(x: jax.Array) -> Any:
            each = lambda x: encode(  # noqa: E731
                x, jnp.asarray(SEEDS), dtype="int8", block_size=64, stochastic=True
            )
            elements, exponents = jax.lax.map(each, x[0])
            return elements[None], exponents[None]

        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("w"), out_specs=P("w")))(x)

    for a, b in zip(worker(KERNELS[platform]), worker(reference.encode), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_the_gpu_kernel_under_vmap() -> None:
    x = jnp.asarray(numbers(6000)).reshape(3, 2000)
    seeds = jnp.arange(6, dtype=jnp.uint32).reshape(3, 2)
    options = {"dtype": "float8_e4m3fn", "block_size": 32, "stochastic": True}
    found, expected = (
        jax.vmap(functools.partial(encode, **options))(x, seeds)
        for encode in (KERNELS["cuda"], reference.encode)
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(as_bytes(a), as_bytes(b))


@pytest.mark.parametrize("platform", CALLS)
@pytest.mark.parametrize("block_size", [32, *map(slow, (64, 128, 256, 512, 1024))])
@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_the_kernel_is_lowered(platform: str, block_size: int, dtype: str) -> None:
    x = jax.ShapeDtypeStruct((2**17 - 77,), dtype)
    seeds = jax.ShapeDtypeStruct((2,), jnp.uint32)
    encode = functools.partial(block_float.encode, block_size=block_size)
    if platform == "cuda" and not _gpu.MOVES_ROWS:
        with pytest.raises(NotImplementedError, match=r"JAX 0\.11 or newer"):
            lowered(
                functools.partial(encode, implementation="mosaic_gpu"), x, seeds, platform=platform
            )
        return
    with implementation("mosaic_gpu", "mosaic_tpu"):
        assert CALLS[platform] in lowered(encode, x, seeds, platform=platform)
        text = lowered(
            jax.vmap(encode),
            *(jax.ShapeDtypeStruct((2, *a.shape), a.dtype) for a in (x, seeds)),
            platform=platform,
        )
        assert CALLS[platform] in text


@pytest.mark.parametrize(("platform", "kernels"), [("tpu", True), ("cuda", False)])
def test_the_default_is_the_assumed_choice(platform: str, kernels: bool) -> None:
    x = jax.ShapeDtypeStruct((2**17,), jnp.float32)
    text = lowered(lambda x: block_float.encode(x, None), x, platform=platform)
    assert (CALLS[platform] in text) == kernels


def test_wrong_arguments() -> None:
    x = jnp.ones(40)
    with pytest.raises(ValueError, match="`x` must be float32 or bfloat16, got int32"):
        block_float.encode(jnp.ones(3, jnp.int32), None)
    with pytest.raises(ValueError, match=r"`dtype` must be one of .*'float16'"):
        block_float.encode(x, None, dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`block_size` must be one of .*, got 16"):
        block_float.encode(x, None, block_size=16)
    with pytest.raises(ValueError, match=r"`block_size` must be one of .*, got 32\.0"):
        block_float.encode(x, None, block_size=32.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`seeds` must be uint32\[2\]"):
        block_float.encode(x, jnp.ones(2, jnp.int32))
    elements, exponents = block_float.encode(x, None)
    with pytest.raises(ValueError, match=r"`exponents` must be uint8\[2\] for 40 elements"):
        block_float.decode(elements, exponents[:1])
    with pytest.raises(ValueError, match="`elements` must be one of"):
        block_float.decode(x, exponents)
    with pytest.raises(TypeError, match=r"`block_float.encode` rounds"):
        jax.grad(lambda x: block_float.encode(x, None)[0].astype(jnp.float32).sum())(x)
