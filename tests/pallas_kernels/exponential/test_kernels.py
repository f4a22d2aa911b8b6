"""Kernels of `exponential`: equal to the reference, and lowered where there is no device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import exponential
from pallas_kernels.exponential import mosaic_gpu, mosaic_tpu, reference
from tests.pallas_kernels.lowering import CALLS, INTERPRET_GPU, INTERPRET_TPU, lowered, on
from tests.slow import slow

MODULES = {"tpu": mosaic_tpu, "cuda": mosaic_gpu}
INTERPRET = {"tpu": INTERPRET_TPU, "cuda": INTERPRET_GPU}
NAMES = {"tpu": "mosaic_tpu", "cuda": "mosaic_gpu"}

seeds = jnp.array([11, 2**32 - 5], jnp.uint32)


def numbers_of(size: int, scale: float) -> jax.Array:
    generator = np.random.default_rng(size)
    x = generator.uniform(-1, 1, size) * np.exp2(-generator.integers(0, 150, size)) * scale
    special = [np.nan, np.inf, -np.inf, 2.0**-126, -(2.0**-140), -0.0, scale, -scale]
    x[: len(special)] = special[:size]
    return jnp.asarray(x.astype(np.float32))


def codes_of(size: int, seed: int) -> jax.Array:
    codes = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return jnp.asarray(np.where(codes == 128, 0, codes))


def bits_of(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint32)


def assert_equal_to_reference(platform: str, size: int, scale: float) -> None:
    kernels, interpret = MODULES[platform], INTERPRET[platform]
    x, a, b = numbers_of(size, scale), codes_of(size, 1), codes_of(size, 2)
    args = x, jnp.float32(scale), seeds
    options = {"headroom": 3, "count": 3}
    both = []
    for module, interpreted in ((kernels, {"interpret": interpret}), (reference, {})):
        encode = jax.jit(functools.partial(module.encode, headroom=3, **interpreted))
        add = jax.jit(functools.partial(module.add, **interpreted))
        decode = jax.jit(functools.partial(module.decode, **options, **interpreted))
        both.append((encode(*args), add(a, b, seeds), bits_of(decode(a, args[1]))))
    for of_kernel, of_reference in zip(*both, strict=True):
        np.testing.assert_array_equal(of_kernel, of_reference)


@pytest.mark.parametrize("size,scale", [(129, 1e-30), slow(140000, 0.7)])
def test_tpu_kernels_are_the_reference(size, scale):
    assert_equal_to_reference("tpu", size, scale)


@pytest.mark.parametrize("size,scale", [(2500, 1e-30), slow(1024, 1e30)])
def test_gpu_kernels_are_the_reference(size, scale):
    assert_equal_to_reference("cuda", size, scale)


@pytest.mark.parametrize("platform", MODULES)
def test_kernels_of_nothing_and_of_a_scalar(platform):
    kernels, interpret = MODULES[platform], INTERPRET[platform]
    none = jnp.zeros((0, 3), jnp.float32)
    codes = kernels.encode(none, jnp.float32(1), seeds, headroom=1, interpret=interpret)
    assert (codes.shape, codes.dtype) == ((0, 3), jnp.uint8)
    scalar = jnp.float32(-0.5)
    codes = kernels.encode(scalar, jnp.float32(1), seeds, headroom=1, interpret=interpret)
    assert codes.shape == () and codes == 0x82


@pytest.mark.parametrize("platform", MODULES)
def test_kernels_widen_bfloat16(platform):
    args = numbers_of(300, 1.0).astype(jnp.bfloat16), jnp.float32(1), seeds
    options = {"headroom": 3, "interpret": INTERPRET[platform]}
    codes = jax.jit(functools.partial(MODULES[platform].encode, **options))(*args)
    expected = jax.jit(functools.partial(reference.encode, headroom=3))(*args)
    np.testing.assert_array_equal(codes, expected)


@pytest.mark.slow
@pytest.mark.parametrize("platform", [slow("tpu"), "cuda"])
def test_kernels_under_vmap(platform, monkeypatch):
    # JAX's interpreter does not know the semantics of the axis that vmap adds to the grid.
    monkeypatch.setattr(mosaic_tpu.pltpu, "CompilerParams", lambda **_: None)
    x, scales = numbers_of(600, 1.0).reshape(2, 300), jnp.array([1, 2], jnp.float32)
    args = x, scales, jnp.stack([seeds, seeds + jnp.uint32(1)])
    encode = functools.partial(MODULES[platform].encode, headroom=3, interpret=INTERPRET[platform])
    expected = jax.vmap(functools.partial(reference.encode, headroom=3))(*args)
    np.testing.assert_array_equal(jax.vmap(encode)(*args), expected)


def round_trip(
    x: jax.Array, scale: jax.Array, seeds: jax.Array, implementation: str | None
) -> jax.Array:
    options = {"headroom": 2, "implementation": implementation}
    codes = exponential.encode(x, scale, seeds, **options)
    sums = exponential.add(codes, codes, seeds, implementation=implementation)
    return exponential.decode(sums, scale, **options)


def types(*batch: int, size: int, dtype: str = "float32") -> list[jax.ShapeDtypeStruct]:
    shapes = [((*batch, size), dtype), (batch, "float32"), ((*batch, 2), "uint32")]
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]


@pytest.mark.parametrize("platform", MODULES)
@pytest.mark.parametrize("size,dtype", [(2**18, "float32"), (2**18 - 77, "bfloat16")])
def test_kernels_are_lowered(platform, size, dtype):
    f = functools.partial(round_trip, implementation=NAMES[platform])
    text = lowered(f, *types(size=size, dtype=dtype), platform=platform)
    assert text.count(f"@{CALLS[platform]}") == 3


@pytest.mark.parametrize("platform", MODULES)
def test_kernels_are_lowered_under_vmap_and_scan(platform):
    f = jax.vmap(functools.partial(round_trip, implementation=NAMES[platform]))
    scanned = lambda *args: jax.lax.scan(lambda _, row: (None, f(*row)), None, args)[1]  # noqa: E731
    text = lowered(scanned, *types(2, 3, size=5000), platform=platform)
    assert text.count(f"@{CALLS[platform]}") == 3


@pytest.mark.parametrize("platform,kernels", [("tpu", 3), ("cuda", 0)])
def test_default_is_the_assumed_choice(platform, kernels):
    f = functools.partial(round_trip, implementation=None)
    text = lowered(f, *types(size=2**18), platform=platform)
    assert text.count(f"@{CALLS[platform]}") == kernels


@pytest.mark.parametrize("platform", MODULES)
def test_kernels_are_lowered_under_shard_map(platform):
    f = functools.partial(round_trip, implementation=NAMES[platform])
    with on(platform, workers=4) as mesh:
        specs = P("workers"), P(), P()
        sharded = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("workers"))
        traced = jax.jit(sharded).trace(*types(size=20000))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count(f"@{CALLS[platform]}") == 3


@pytest.mark.parametrize("platform", MODULES)
def test_kernels_run_under_shard_map(platform):
    x = numbers_of(600, 1.0)
    encode = functools.partial(MODULES[platform].encode, headroom=3, interpret=INTERPRET[platform])
    mesh = jax.make_mesh((2,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = P("workers"), P(), P()
    sharded = jax.shard_map(encode, mesh=mesh, in_specs=specs, out_specs=P("workers"))
    half = functools.partial(reference.encode, scale=jnp.float32(1), seeds=seeds, headroom=3)
    expected = np.concatenate([half(x[:300]), half(x[300:])])
    np.testing.assert_array_equal(jax.jit(sharded)(x, jnp.float32(1), seeds), expected)
