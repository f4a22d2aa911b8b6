"""At most the threshold is sent, and what is left stays below it while updates do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Claims, Context, Memory
from jaxcomm.compression import scaled
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import fixed_threshold


def test_three_values() -> None:
    codec = fixed_threshold(0.5)
    x = jnp.array([[0.5, 0.49, -0.5], [-7.0, 0.0, -0.2]])
    payload, _ = codec.encode(Context.of(x), x)
    assert payload.codes.shape == (1,)  # Six coordinates, of sixteen that a word holds.
    result = codec.decode(Context.of(x).received(), payload)
    np.testing.assert_array_equal(result, [[0.5, 0, -0.5], [-0.5, 0, 0]])


def _residuals(x: jax.Array, steps: int) -> np.ndarray:
    codec = error_feedback(fixed_threshold(0.5))

    def step(memory: Memory, x: jax.Array) -> tuple[Memory, jax.Array]:
        _, memory = codec.encode(Context.of(x, memory=memory), x)
        return memory, memory.own.kept

    return np.asarray(jax.lax.scan(step, codec.init(x[0]), x, length=steps)[1])


def test_what_is_left_stays_below_the_threshold_while_updates_do() -> None:
    rng = np.random.default_rng(0)
    within = jnp.asarray(rng.uniform(-0.5, 0.5, size=(200, 50)) + 0.3).clip(-0.5, 0.5)
    left = _residuals(within.astype(jnp.float32), 200)
    assert 0.25 < np.abs(left).max() <= 0.5 + 1e-6


def test_what_is_left_of_larger_updates_grows() -> None:
    left = _residuals(jnp.full((100, 3), 0.75), 100)
    np.testing.assert_allclose(left[-1], 0.25 * 100, rtol=1e-5)


def test_it_claims_no_relative_bound() -> None:
    codec = fixed_threshold(1)
    assert codec.claims == Claims(variance=None, contraction=None, bounded=True)
    with pytest.raises(ValueError, match="variance"):
        scaled(codec)


@pytest.mark.parametrize("threshold", [0, -1.0, np.inf, np.nan, True, "0.5"])
def test_thresholds_are_positive_numbers(threshold: object) -> None:
    with pytest.raises(ValueError, match="`threshold`"):
        fixed_threshold(threshold)
