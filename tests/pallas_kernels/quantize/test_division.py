"""The quotient in integers is that of IEEE 754, which NumPy computes on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantize.reference import divide


def _positive(seed: int, exponents: tuple[int, int]) -> np.ndarray:
    random = np.random.default_rng(seed)
    mantissa = random.integers(0, 2**23, 100_000, np.uint32)
    mantissa[:1000] = random.choice(
        np.array([0, 1, 2, 2**22, 2**23 - 2, 2**23 - 1], np.uint32), 1000
    )
    exponent = random.integers(*exponents, 100_000, np.uint32)
    return (exponent << 23 | mantissa).view(np.float32)


def test_quotients_are_rounded_to_the_nearest() -> None:
    numerator, denominator = _positive(0, (100, 200)), _positive(1, (100, 200))
    with np.errstate(all="raise"):
        expected = numerator / denominator
    actual = jax.jit(divide)(jnp.asarray(numerator), jnp.asarray(denominator))
    np.testing.assert_array_equal(np.asarray(actual), expected)


def test_equal_numbers_and_powers_of_two() -> None:
    x = jnp.array([1, 3, 2.0**-126, 3e38, 5], jnp.float32)
    y = jnp.array([1, 3, 2.0**-126, 3e38, 2.0**-100], jnp.float32)
    assert divide(x, y).tolist() == [1, 1, 1, 1, 5 * 2.0**100]
