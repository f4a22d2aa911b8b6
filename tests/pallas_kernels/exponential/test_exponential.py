"""Codes of powers of two: the reference is what the formulas say, and no sum is biased."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import exponential
from tests.pallas_kernels.exponential import oracle
from tests.pallas_kernels.hash_oracle import word
from tests.pallas_kernels.workloads import interpreted
from tests.slow import slow

SEEDS = (11, 2**32 - 5)

encode = jax.jit(exponential.encode, static_argnames="headroom")
decode = jax.jit(exponential.decode, static_argnames=("headroom", "count"))
add = jax.jit(exponential.add)

every_code = np.array([0, *range(1, 128), *range(129, 256)], np.uint8)


def key(*seeds: int) -> jax.Array:
    return jnp.array(seeds, jnp.uint32)


def numbers_of(size: int, scale: float) -> np.ndarray:
    """Of all magnitudes up to the scale, and the numbers that are special."""
    generator = np.random.default_rng(size)
    x = generator.uniform(-1, 1, size) * np.exp2(-generator.integers(0, 150, size)) * scale
    special = [scale, -scale, 0.0, -0.0, np.nan, np.inf, -np.inf, 2.0**-126, -(2.0**-140), 1e38]
    x = x.astype(np.float32)
    x[: len(special)] = np.array(special[:size], np.float32)
    return x


@pytest.mark.parametrize("headroom", [4, slow(1), slow(62)])
@pytest.mark.parametrize("scale", [0.7, 2.0**-126, 3.4e38, *map(slow, [1.0, 1e-30, 1e30, 2.0**64])])
def test_codes_are_those_of_the_formula(scale, headroom):
    x = numbers_of(4001, scale)
    codes = encode(jnp.asarray(x), jnp.float32(scale), key(*SEEDS), headroom=headroom)
    codes = np.asarray(codes)
    np.testing.assert_array_equal(codes, oracle.encode(x, scale, SEEDS, headroom))
    finite = codes[codes % 128 > 0] % 128
    assert headroom <= finite.min() and finite.max() <= 126


def test_subnormal_and_nonfinite_scales_give_zeros():
    x = jnp.array([1e-40, 1.0, -1.0, np.inf, np.nan], jnp.float32)
    for scale in (0.0, 2.0**-140, np.inf, np.nan):
        codes = encode(x, jnp.float32(scale), key(*SEEDS), headroom=2)
        assert codes.tolist() == [0, 0, 0, 0, 0]
        values = decode(codes, jnp.float32(scale), headroom=2)
        assert bool(jnp.all(jnp.isfinite(values))) == (scale < 1)


def test_every_code_is_decoded():
    for scale, headroom, count in [(1.0, 1, 1), (0.3, 3, 3), (3e38, 4, 7)]:
        values = decode(jnp.asarray(every_code), jnp.float32(scale), headroom=headroom, count=count)
        with np.errstate(over="ignore"):
            expected = oracle.flushed(oracle.decode(every_code, scale, headroom, count))
        np.testing.assert_array_equal(oracle.flushed(np.asarray(values)), expected)


def test_every_sum_of_two_codes_is_that_of_the_formula():
    a, b = (np.tile(codes.ravel(), 4) for codes in np.meshgrid(every_code, every_code))
    sums = add(jnp.asarray(a), jnp.asarray(b), key(*SEEDS))
    np.testing.assert_array_equal(sums, oracle.add(a, b, SEEDS))


def test_probabilities_below_23_bits_are_zero():
    """The largest word carries at every probability but 0, and the smallest at none but 1."""
    largest, smallest = (0, 3589926852), (0, 0)
    assert word(0, largest) == 2**32 - 1 and word(0, smallest) == 0
    a = np.uint8([50])
    for gap, moves in ((23, True), (24, False), (60, False)):
        b = a + np.uint8(gap)
        sums = add(jnp.asarray(a), jnp.asarray(b), key(*largest))
        assert sums.tolist() == oracle.add(a, b, largest).tolist() == [49 if moves else 50]
        # The lower neighbor is at half the distance.
        differences = add(jnp.asarray(a), jnp.asarray(b + np.uint8(129)), key(*smallest))
        assert differences.tolist() == [51 if moves else 50]


def test_sums_are_unbiased():
    size = 2**17
    value = lambda codes: oracle.decode(np.asarray(codes), 1.0, 0).astype(np.float64)  # noqa: E731
    for a, b in [(5, 5), (5, 6), (5, 9), (9, 133), (6, 133), (130, 131), (7, 0)]:
        sums = add(jnp.full(size, a, jnp.uint8), jnp.full(size, b, jnp.uint8), key(3, 4))
        values, exact = value(sums), value(np.array([a, b], np.uint8)).sum()
        assert abs(values.mean() - exact) <= 4.9 * values.std() / np.sqrt(size)
        assert np.mean(values**2) <= 9 / 8 * exact**2 * 1.02
        assert (values.std() > 0) == ((a, b) in [(5, 9), (9, 133), (5, 6), (130, 131)])


@pytest.mark.parametrize("shape", [(3, 5, 7), *map(slow, [(), (3, 0), (1,)])])
def test_shapes_are_kept_and_bfloat16_is_widened(shape):
    x = np.random.default_rng(0).uniform(-1, 1, shape).astype(jnp.bfloat16)
    codes = encode(jnp.asarray(x), jnp.float32(1), key(*SEEDS), headroom=2)
    expected = oracle.encode(x.ravel().astype(np.float32), 1.0, SEEDS, 2).reshape(shape)
    np.testing.assert_array_equal(codes, expected, strict=True)
    sums = add(codes, codes, key(*SEEDS))
    assert (sums.shape, sums.dtype) == (shape, jnp.uint8)
    values = decode(codes, jnp.float32(1), headroom=2)
    assert (values.shape, values.dtype) == (shape, jnp.float32)


@pytest.mark.parametrize(
    ("name", "size", "scale", "dtype"),
    [
        ("mosaic_tpu", 129, 1e-30, "float32"),
        ("mosaic_gpu", 2500, 1e-30, "bfloat16"),
        slow("mosaic_tpu", 140_000, 0.7, "bfloat16"),
        slow("mosaic_gpu", 1024, 1e30, "float32"),
    ],
)
def test_kernels_are_the_reference(name, size, scale, dtype):
    """Of numbers of all magnitudes and of all codes, bit for bit; sums are in `test_every_row`."""
    x, codes = jnp.asarray(numbers_of(size, scale), dtype), np.resize(every_code, size)

    def both(name):
        def run(x, scale, codes):
            options = {"headroom": 3, "implementation": name}
            decoded = exponential.decode(codes, scale, count=3, **options)
            return exponential.encode(x, scale, key(*SEEDS), **options), decoded.view(jnp.uint32)

        return jax.jit(run)(x, jnp.float32(scale), codes)

    with interpreted():
        found = both(name)
    jax.tree.map(np.testing.assert_array_equal, found, both("reference"))
