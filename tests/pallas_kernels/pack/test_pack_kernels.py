"""Kernels of `pack` and `unpack`: equal to the reference, and lowered where there is no device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.pack import mosaic_gpu, mosaic_tpu, pack, reference, unpack
from tests.pallas_kernels.lowering import CALLS, INTERPRET_GPU, INTERPRET_TPU, lowered, on
from tests.slow import slow

MODULES = {"tpu": mosaic_tpu, "cuda": mosaic_gpu}
INTERPRET = {"tpu": INTERPRET_TPU, "cuda": INTERPRET_GPU}
NAMES = {"tpu": "mosaic_tpu", "cuda": "mosaic_gpu"}


def numbers_below(limit: int, size: int) -> jax.Array:
    numbers = np.random.default_rng(size).integers(0, limit, size, dtype=np.uint64)
    return jnp.asarray(numbers.astype(np.uint32))


def assert_equal_to_reference(platform: str, numbers: jax.Array, bits: int) -> None:
    kernels, interpret = MODULES[platform], INTERPRET[platform]
    shape, both = numbers.shape, []
    packed = jax.jit(functools.partial(reference.pack, bits=bits))(numbers)
    for module, interpreted in ((kernels, {"interpret": interpret}), (reference, {})):
        pack = jax.jit(functools.partial(module.pack, bits=bits, **interpreted))
        unpack = functools.partial(module.unpack, bits=bits, shape=shape, **interpreted)
        both.append((pack(numbers), jax.jit(unpack)(packed)))
    for of_kernel, of_reference in zip(*both, strict=True):
        np.testing.assert_array_equal(of_kernel, of_reference)


@pytest.mark.parametrize(
    "bits,size",
    [
        (3, 5000),
        (16, 127),
        slow(1, 300000),
        slow(4, 280000),
        slow(8, 4096),
        slow(10, 7),
        slow(32, 1),
    ],
)
def test_tpu_kernels_are_the_reference(bits, size):
    assert_equal_to_reference("tpu", numbers_below(2**bits, size), bits)


@pytest.mark.parametrize("bits,size", [(10, 700), slow(1, 17000), slow(4, 4096), slow(32, 1)])
def test_gpu_kernels_are_the_reference(bits, size):
    assert_equal_to_reference("cuda", numbers_below(2**bits, size), bits)


@pytest.mark.parametrize("platform", MODULES)
@pytest.mark.parametrize("bits,dtype", [(1, "bool"), slow(8, "uint8")])
def test_kernels_take_narrow_dtypes(platform, bits, dtype):
    numbers = numbers_below(2**bits, 1500).astype(dtype)
    packed = MODULES[platform].pack(numbers, bits=bits, interpret=INTERPRET[platform])
    np.testing.assert_array_equal(packed, reference.pack(numbers, bits=bits))


@pytest.mark.quick(1)
@pytest.mark.parametrize("platform", MODULES)
def test_numbers_too_large_spill_alike(platform):
    """What is not promised is at least the same on every backend."""
    assert_equal_to_reference(platform, numbers_below(2**32, 900), 16)


@pytest.mark.parametrize("platform", MODULES)
def test_kernels_of_nothing(platform):
    assert_equal_to_reference(platform, jnp.zeros((0, 3), jnp.uint32), 4)


@pytest.mark.slow
@pytest.mark.parametrize("platform", MODULES)
def test_kernels_under_vmap(platform, monkeypatch):
    # JAX's interpreter does not know the semantics of the axis that vmap adds to the grid.
    monkeypatch.setattr(mosaic_tpu.pltpu, "CompilerParams", lambda **_: None)
    numbers = numbers_below(16, 3000).reshape(2, 1500)
    kernels, interpret = MODULES[platform], INTERPRET[platform]
    packed = jax.vmap(functools.partial(kernels.pack, bits=4, interpret=interpret))(numbers)
    np.testing.assert_array_equal(packed, jax.vmap(functools.partial(pack, bits=4))(numbers))
    unpack_each = functools.partial(kernels.unpack, bits=4, shape=(1500,), interpret=interpret)
    np.testing.assert_array_equal(jax.vmap(unpack_each)(packed), numbers)


@pytest.mark.quick(1)
@pytest.mark.parametrize("platform", MODULES)
@pytest.mark.parametrize("bits,size", [(1, 2**18), (3, 2**18), (4, 2**18 - 77), (8, 2**18)])
def test_kernels_are_lowered(platform, bits, size):
    dtype = {1: jnp.bool, 8: jnp.uint8}.get(bits, jnp.uint32)
    numbers = jax.ShapeDtypeStruct((size,), dtype)
    words = jax.ShapeDtypeStruct((reference.words(size, bits),), jnp.uint32)
    to_words = functools.partial(pack, bits=bits, implementation=NAMES[platform])
    to_numbers = functools.partial(unpack, bits=bits, shape=(size,), implementation=NAMES[platform])
    assert CALLS[platform] in lowered(to_words, numbers, platform=platform)
    assert CALLS[platform] in lowered(to_numbers, words, platform=platform)


@pytest.mark.parametrize("platform", MODULES)
def test_kernels_are_lowered_under_vmap_and_scan(platform):
    def step(carry, row):
        words = jax.vmap(functools.partial(pack, bits=4, implementation=NAMES[platform]))(row)
        through = functools.partial(unpack, bits=4, shape=(5000,), implementation=NAMES[platform])
        return carry, jax.vmap(through)(words)

    rows = jax.ShapeDtypeStruct((2, 3, 5000), jnp.uint32)
    text = lowered(lambda rows: jax.lax.scan(step, None, rows)[1], rows, platform=platform)
    assert text.count(f"@{CALLS[platform]}") >= 2


@pytest.mark.parametrize("platform,chosen", [("tpu", True), ("cuda", False)])
def test_default_is_the_assumed_choice(platform, chosen):
    numbers = jax.ShapeDtypeStruct((2**18,), jnp.uint32)
    text = lowered(functools.partial(pack, bits=4), numbers, platform=platform)
    assert (CALLS[platform] in text) == chosen


@pytest.mark.parametrize("platform", MODULES)
def test_kernels_are_lowered_under_shard_map(platform):
    def through(numbers):
        words = pack(numbers, bits=4, implementation=NAMES[platform])
        words = jax.lax.psum(words, "workers")
        return unpack(words, bits=4, shape=(5000,), implementation=NAMES[platform])

    with on(platform, workers=4) as mesh:
        sharded = jax.shard_map(through, mesh=mesh, in_specs=P("workers"), out_specs=P())
        numbers = jax.ShapeDtypeStruct((20000,), jnp.uint32)
        text = jax.jit(sharded).trace(numbers).lower(lowering_platforms=(platform,)).as_text()
    assert CALLS[platform] in text


@pytest.mark.parametrize("platform", MODULES)
def test_kernels_run_under_shard_map(platform):
    numbers = numbers_below(4, 3000)
    kernels, interpret = MODULES[platform], INTERPRET[platform]

    def total(numbers):
        words = kernels.pack(numbers, bits=4, interpret=interpret)
        words = jax.lax.psum(words, "workers")
        return kernels.unpack(words, bits=4, shape=(1500,), interpret=interpret)

    mesh = jax.make_mesh((2,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(total, mesh=mesh, in_specs=P("workers"), out_specs=P())
    np.testing.assert_array_equal(jax.jit(sharded)(numbers), numbers[:1500] + numbers[1500:])
