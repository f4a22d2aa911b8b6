"""The quotient in integers is that of IEEE 754, which NumPy computes on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._division import divide


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


@pytest.mark.parametrize("off", [-12, -3, 3, 12])
def test_a_poor_division_of_the_backend_is_corrected(
    off: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poor(x: jax.Array, y: jax.Array) -> jax.Array:
        word = jax.lax.bitcast_convert_type(jax.lax.div(x, y), jnp.int32) + off // 2
        return jax.lax.bitcast_convert_type(word, jnp.float32)

    monkeypatch.setattr(type(jnp.ones(1)), "__truediv__", poor)
    numerator, denominator = _positive(2, (100, 200)), _positive(3, (100, 200))
    assert poor(jnp.float32(3), jnp.float32(2)) != 1.5
    actual = divide(jnp.asarray(numerator), jnp.asarray(denominator))
    np.testing.assert_array_equal(np.asarray(actual), numerator / denominator)
