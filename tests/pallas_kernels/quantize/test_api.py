"""`quantize` and `dequantize` as they are called: transformations, and wrong arguments."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels.quantize import dequantize, quantize

X, SCALE, SEEDS = jnp.linspace(-1, 1, 50), jnp.float32(1), jnp.array([1, 2], jnp.uint32)
BITS_8 = {"levels": 127, "bits": 8}


def test_jit_with_a_donated_buffer() -> None:
    step = functools.partial(quantize, **BITS_8, residual=True)
    codes, rest = jax.jit(step)(X, SCALE, SEEDS)
    donated = X + 0
    donated_codes, donated_rest = jax.jit(step, donate_argnums=0)(donated, SCALE, SEEDS)
    assert donated.is_deleted()
    np.testing.assert_array_equal(donated_codes, codes)
    np.testing.assert_array_equal(donated_rest, rest)


@pytest.mark.parametrize("bits", [4, 8])
def test_vmap_is_a_loop(bits: int) -> None:
    one = jax.jit(functools.partial(quantize, levels=7, bits=bits))
    x = jnp.stack([X, 2 * X, -X])
    scales = jnp.array([1.0, 2.0, 4.0])
    seeds = jnp.arange(6, dtype=jnp.uint32).reshape(3, 2)
    np.testing.assert_array_equal(
        jax.vmap(one)(x, scales, seeds), [one(*row) for row in zip(x, scales, seeds, strict=True)]
    )


def test_scan_with_error_feedback_loses_nothing() -> None:
    """What was decoded, and what is left over, add up to what came in."""

    def step(rest: jax.Array, seeds: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = jnp.max(jnp.abs(X + rest))
        codes, rest = quantize(X + rest, scale, seeds, levels=3, bits=4, residual=True)
        return rest, dequantize(codes, scale, levels=3, bits=4, shape=X.shape)

    seeds = jnp.arange(40, dtype=jnp.uint32).reshape(20, 2)
    rest, decoded = jax.jit(lambda: jax.lax.scan(step, jnp.zeros(50), seeds))()
    np.testing.assert_allclose(jnp.sum(decoded, 0) + rest, 20 * X, atol=1e-5)
    assert float(jnp.max(jnp.abs(rest))) > 0.01


def test_in_a_checked_shard_map() -> None:
    mesh = jax.make_mesh((4,), ("w",), axis_types=(jax.sharding.AxisType.Auto,))

    def worker(x: jax.Array, seeds: jax.Array) -> jax.Array:
        codes = quantize(x, SCALE, seeds[0], levels=15, bits=8)
        total = jax.lax.psum(codes, "w")
        return dequantize(total, SCALE, levels=15, bits=8, count=4, shape=x.shape)

    x = jnp.stack([X, -X, X, X / 2]).ravel()
    seeds = jnp.arange(8, dtype=jnp.uint32).reshape(4, 2)
    mapped = jax.shard_map(worker, mesh=mesh, in_specs=(P("w"), P("w")), out_specs=P())
    mean = jax.jit(mapped)(x, seeds)
    assert np.abs(mean - x.reshape(4, 50).mean(axis=0)).max() < 1 / 15


def test_rounding_has_no_gradient() -> None:
    def loss(x: jax.Array, scale: jax.Array) -> jax.Array:
        _, rest = quantize(x, scale, SEEDS, **BITS_8, residual=True)
        return rest.sum()

    for argument in (0, 1):
        with pytest.raises(TypeError, match="`quantize` rounds"):
            jax.grad(loss, argnums=argument)(X, SCALE)
    assert (
        jax.grad(lambda x: loss(jax.lax.stop_gradient(x), SCALE) + x.sum())(X).tolist() == [1] * 50
    )


def test_decoding_is_linear_and_has_its_gradient() -> None:
    codes = quantize(X, SCALE, SEEDS, **BITS_8)
    weights = jnp.cos(jnp.arange(50.0))

    def loss(scale: jax.Array, accumulate: jax.Array) -> jax.Array:
        options = {"shape": (50,), "accumulate": accumulate}
        return jnp.vdot(weights, dequantize(codes, scale, **BITS_8, **options))

    by_scale, by_accumulate = jax.jit(jax.grad(loss, argnums=(0, 1)))(SCALE, X)
    expected = np.dot(np.asarray(weights, np.float64), np.asarray(codes, np.float64) / 127)
    np.testing.assert_allclose(by_scale, expected, rtol=1e-5)
    np.testing.assert_array_equal(by_accumulate, weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.arange(50)}, "`x` must be float32 or bfloat16, got int32"),
        ({"x": X.astype(jnp.float16)}, "`x` must be float32 or bfloat16, got float16"),
        ({"scale": jnp.ones(1)}, r"`scale` must be float32\[\], got float32\[1\]"),
        ({"scale": jnp.bfloat16(1)}, r"`scale` must be float32\[\], got bfloat16\[\]"),
        ({"seeds": jnp.zeros(2, jnp.int32)}, r"`seeds` must be uint32\[2\], got int32"),
        ({"seeds": jnp.zeros(3, jnp.uint32)}, r"`seeds` must be uint32\[2\], got uint32\[3\]"),
        ({"seeds": jnp.uint32(1)}, r"`seeds` must be uint32\[2\], got uint32\[\]"),
        ({"bits": 1}, r"`bits` must be in \[2, 16\], or 32, got 1"),
        ({"bits": 17}, r"`bits` must be in \[2, 16\], or 32, got 17"),
        ({"levels": 0}, r"`levels` must be in \[1, 16777215\], got 0"),
        ({"levels": 2**24, "bits": 32}, r"`levels` must be in \[1, 16777215\], got 16777216"),
        ({"levels": 128}, "`bits`=8 cannot hold the sum of 1 codes of `levels`=128"),
        ({"implementation": "triton"}, "`implementation` must be None or one of"),
    ],
)
def test_wrong_arguments_of_quantize(change: dict[str, Any], message: str) -> None:
    arguments = {"x": X, "scale": SCALE, "seeds": SEEDS, **BITS_8} | change
    with pytest.raises(ValueError, match=message):
        quantize(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": jnp.zeros(50, jnp.int32)}, r"`codes` must be int8\[50\] for `bits`=8"),
        ({"codes": jnp.zeros(49, jnp.int8)}, r"`codes` must be int8\[50\]"),
        ({"bits": 4, "levels": 7}, r"`codes` must be uint32\[7\]"),
        ({"bits": 32}, r"`codes` must be int32\[50\]"),
        ({"scale": jnp.int32(1)}, r"`scale` must be float32\[\]"),
        ({"count": 0}, "`count` must be at least 1, got 0"),
        ({"count": 2}, "`bits`=8 cannot hold the sum of 2 codes of `levels`=127"),
        ({"accumulate": jnp.zeros(49)}, r"`accumulate` must be float32\[50\], got float32\[49\]"),
        ({"accumulate": X.astype(jnp.bfloat16)}, "`accumulate` must be float32"),
    ],
)
def test_wrong_arguments_of_dequantize(change: dict[str, Any], message: str) -> None:
    arguments = {"codes": jnp.zeros(50, jnp.int8), "scale": SCALE, "shape": (50,), **BITS_8}
    with pytest.raises(ValueError, match=message):
        dequantize(**arguments | change)


@pytest.mark.parametrize("shape", [(2**32,), (2**16, 2**16)])
def test_a_counter_that_would_wrap_is_refused(shape: tuple[int, ...]) -> None:
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    with pytest.raises(ValueError, match=r"2\*\*32 elements or more: split the leaf"):
        jax.eval_shape(lambda x: quantize(x, SCALE, SEEDS, **BITS_8), x)
    codes = jax.ShapeDtypeStruct(shape, jnp.int8)
    with pytest.raises(ValueError, match=r"2\*\*32 elements or more: split the leaf"):
        jax.eval_shape(lambda codes: dequantize(codes, SCALE, shape=shape, **BITS_8), codes)
    x = jax.ShapeDtypeStruct((2**32 - 1,), jnp.float32)
    assert jax.eval_shape(lambda x: quantize(x, SCALE, SEEDS, **BITS_8), x).shape == x.shape


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "mosaic_tpu"])
def test_a_named_kernel_is_not_replaced(implementation: Any) -> None:
    options = {**BITS_8, "implementation": implementation}
    with pytest.raises(NotImplementedError, match="this program is for cpu"):
        quantize(X, SCALE, SEEDS, **options)
    with pytest.raises(NotImplementedError, match="this program is for cpu"):
        dequantize(jnp.zeros(50, jnp.int8), SCALE, shape=(50,), **options)
