"""The reference of `quantize` and `dequantize` against NumPy, over shapes, scales and noise."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantize import dequantize, quantize
from pallas_kernels.quantize.reference import divide, factors, round_fixed
from tests.pallas_kernels.quantize import oracle
from tests.pallas_kernels.quantize.oracle import BY_WIDTH, Case
from tests.slow import slow

SEEDS = np.array([2**32 - 7, 12345], np.uint32)

# Zero, subnormal, the smallest normal, below and above where the factor is lifted, the largest.
SCALES = [0.0, 2.0**-130, 2.0**-126, 2.0**-61, 2.0**-59, 1.0, 3.0, 3.4028234663852886e38, np.inf]


def quantized(x: np.ndarray, scale: float, case: Case, **options: bool) -> list[np.ndarray]:
    function = jax.jit(lambda *a: quantize(*a, levels=case.levels, bits=case.bits, **options))
    results = function(jnp.asarray(x), jnp.float32(scale), jnp.asarray(SEEDS))
    return [np.asarray(result) for result in jax.tree.leaves(results)]


@pytest.mark.parametrize("shape", [(3, 5, 14), slow(()), slow((2, 0))], ids=str)
@pytest.mark.parametrize("case", BY_WIDTH, ids=str)
def test_codes_of_every_width_and_shape(case: Case, shape: tuple[int, ...]) -> None:
    x = oracle.numbers(shape, 3.0)
    (fields,) = quantized(x, 3.0, case)
    expected = oracle.fields_of(oracle.codes_of(x, 3.0, SEEDS, case.levels), case)
    np.testing.assert_array_equal(fields, expected, strict=True)


@pytest.mark.parametrize("case", [Case(127, 8), slow(Case(7, 4))], ids=str)
def test_codes_of_every_scale(case: Case) -> None:
    rounded = jax.jit(lambda *a: quantize(*a, levels=case.levels, bits=case.bits))
    for scale in SCALES:
        x = oracle.numbers((64,), scale if 0 < scale < np.inf else 1.0)
        codes = oracle.codes_of(x, scale, SEEDS, case.levels)
        fields = rounded(jnp.asarray(x), jnp.float32(scale), jnp.asarray(SEEDS))
        np.testing.assert_array_equal(fields, oracle.fields_of(codes, case))
        if 2.0**-126 <= scale < np.inf:
            assert codes[0] == case.levels == codes[12] and codes[1] == -case.levels == codes[13]
        else:
            assert not codes.any()


def test_bfloat16_is_as_if_it_were_widened() -> None:
    narrow = jnp.asarray(oracle.numbers((300,), 1.0)).astype(jnp.bfloat16)
    codes, rest = quantized(np.asarray(narrow), 1.0, Case(127, 8), residual=True)
    wide, wide_rest = quantized(np.asarray(narrow, np.float32), 1.0, Case(127, 8), residual=True)
    np.testing.assert_array_equal(codes, wide)
    assert rest.dtype == jnp.bfloat16
    # Both are float32 within the last bit, and then rounded.
    np.testing.assert_allclose(rest.astype(np.float32), wide_rest, rtol=2.0**-7, atol=2.0**-22)


@pytest.mark.parametrize("scale", [1.0, slow(2.0**-110), slow(3e38)])
def test_the_residual_is_the_quantization_error(scale: float) -> None:
    x = oracle.numbers((200,), scale)
    _, rest = quantized(x, scale, Case(127, 8), residual=True)
    with np.errstate(over="ignore", invalid="ignore"):
        decoded = oracle.codes_of(x, scale, SEEDS, 127) * (np.float64(np.float32(scale)) / 127)
        expected = x.astype(np.float64) - decoded
    assert np.isnan(rest[2]) and rest[3] == np.inf and rest[4] == -np.inf
    finite = np.isfinite(expected)
    # The step and its product are rounded, and the difference is.
    bound = 2.0**-21 * (np.abs(x.astype(np.float64)) + np.abs(decoded)) + 2.0**-126
    assert (np.abs(rest[finite] - expected[finite]) <= bound[finite]).all()


@pytest.mark.parametrize(
    "case", [slow(Case(1, 4)), slow(Case(15, 8)), Case(15, 10), slow(Case(99, 32))], ids=str
)
def test_sums_of_fields_decode_to_the_mean(case: Case) -> None:
    shape, count, scale = (5, 13), 5, 2.5
    codes = np.random.default_rng(0).integers(-case.levels, case.levels + 1, (count, *shape))
    codes[:, 0, :2] = [case.levels, -case.levels]  # The largest sums.
    fields = [oracle.fields_of(c, case) for c in codes]
    added = np.linspace(-1, 1, 65, dtype=np.float32).reshape(shape)
    decoded = dequantize(
        jnp.asarray(np.sum(fields, axis=0, dtype=fields[0].dtype)),
        jnp.float32(scale),
        levels=case.levels,
        bits=case.bits,
        count=count,
        shape=shape,
        accumulate=jnp.asarray(added),
    )
    mean = codes.sum(axis=0) * scale / (case.levels * count)
    assert decoded.dtype == jnp.float32
    bound = 2.0**-22 * (np.abs(mean) + np.abs(added))
    assert (np.abs(decoded - (mean + added)) <= bound).all()


def test_the_largest_scale_decodes_to_finite_numbers() -> None:
    largest = jnp.finfo(jnp.float32).max
    for levels in range(1, 60):  # Of some, the step is rounded up.
        count = levels % 3 + 1
        codes = jnp.full(4, levels * count, jnp.int32)
        options = {"levels": levels, "bits": 32, "count": count, "shape": (4,)}
        decoded = dequantize(codes, jnp.float32(largest), **options)
        assert np.isfinite(decoded).all()
        np.testing.assert_allclose(decoded, largest, rtol=2.0**-22)


@pytest.mark.parametrize("case", [slow(Case(127, 8)), Case(7, 4), slow(Case(1, 2))], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, slow(jnp.bfloat16)])
def test_sums_with_a_residual_are_quantized_and_the_error_is_kept(case: Case, dtype: Any) -> None:
    x = np.random.default_rng(0).normal(size=203).astype(np.float32)
    kept = jnp.asarray(x[::-1] / 8, dtype)
    y = x + np.asarray(kept, np.float32)
    scale, divisor = np.float32(np.abs(y).max()), 1.5
    step = functools.partial(quantize, **case._asdict(), residual=True, divisor=divisor)
    fields, rest = jax.jit(step)(jnp.asarray(x), scale, jnp.asarray(SEEDS), added=kept)
    codes = oracle.codes_of(y, scale, SEEDS, case.levels)
    np.testing.assert_array_equal(fields, oracle.fields_of(codes, case))
    exact = y.astype(np.float64) - codes * (np.float64(scale) / case.levels) / divisor
    assert rest.dtype == dtype
    precision = 2.0**-21 if dtype == jnp.float32 else 2.0**-8
    assert np.abs(np.asarray(rest, np.float64) - exact).max() <= precision * scale


def test_decoding_is_linear_and_has_its_gradient() -> None:
    codes = jnp.arange(-25, 25, dtype=jnp.int8)
    weights = jnp.cos(jnp.arange(50.0))

    def loss(scale: jax.Array, accumulate: jax.Array) -> jax.Array:
        options = {"levels": 127, "bits": 8, "shape": (50,), "accumulate": accumulate}
        return jnp.vdot(weights, dequantize(codes, scale, **options))

    by_scale, by_accumulate = jax.jit(jax.grad(loss, argnums=(0, 1)))(jnp.float32(1), jnp.ones(50))
    expected = np.dot(np.asarray(weights, np.float64), np.asarray(codes, np.float64) / 127)
    np.testing.assert_allclose(by_scale, expected, rtol=1e-5)
    np.testing.assert_array_equal(by_accumulate, weights)


def test_quotients_in_integers_are_those_of_ieee_754() -> None:
    """As NumPy computes them on the CPU: of random mantissas, and of those at the ends."""
    random = np.random.default_rng(0)
    mantissa, exponent = (
        random.integers(0, 2**23, (2, 10**5)),
        random.integers(100, 200, (2, 10**5)),
    )
    ends = np.array([0, 1, 2, 2**22, 2**23 - 2, 2**23 - 1])
    mantissa[:, :1000] = random.choice(ends, (2, 1000))
    x, y = (exponent << 23 | mantissa).astype(np.uint32).view(np.float32)
    found = jax.jit(divide)(jnp.asarray(x), jnp.asarray(y))
    np.testing.assert_array_equal(np.asarray(found), x / y)
    x = jnp.array([1, 3, 2.0**-126, 3e38, 5], jnp.float32)
    y = jnp.array([1, 3, 2.0**-126, 3e38, 2.0**-100], jnp.float32)
    assert divide(x, y).tolist() == [1, 1, 1, 1, 5 * 2.0**100]


@pytest.mark.parametrize(("levels", "digits"), [(127, 15), slow(7, 19), slow(1, 21)])
def test_the_mean_over_all_noise_is_the_nearest_multiple(levels: int, digits: int) -> None:
    """Exactly, of 2**-digits: of ties, of numbers that are rounded to zero, and of others."""
    unit, scale = 2.0**-digits, np.float32(levels)  # So a number is its own number of levels.
    halves = np.array([0.5, 0.75, 1.5, 2.5, -0.5, -1.5, -2.5, 1001.5, -1002.5]) * unit
    others = np.random.default_rng(0).uniform(-levels, levels, 7)
    x = np.concatenate([halves, others, [levels, -levels, 1e-7]]).astype(np.float32)
    lift, factor = factors(jnp.asarray(scale), levels)
    noise = jnp.arange(2**digits, dtype=jnp.uint32) << (32 - digits)

    def total(x: jax.Array) -> jax.Array:
        codes = round_fixed(jnp.full(noise.shape, x), lift, factor, noise, levels)
        return jnp.sum(codes, dtype=jnp.int32)

    means = np.asarray(jax.lax.map(jax.jit(total), jnp.asarray(x))) * unit
    np.testing.assert_array_equal(means, oracle.expected_codes(x, scale, levels))
    np.testing.assert_array_equal(means[:9] / unit, [0, 1, 2, 2, 0, -2, -2, 1002, -1002])
    # Half a unit, and the rounding of a product to 24 digits.
    exact = x.astype(np.float64)
    assert (np.abs(means - exact) <= unit / 2 + np.abs(exact) * 2.0**-24).all()
    assert means[-1] == 0
