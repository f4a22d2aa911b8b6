"""Signs: zeros, magnitudes that neither overflow nor vanish, and why plain ones get no feedback."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Codec, Context
from jaxcomm.compression.feedback import error_feedback, momentum
from jaxcomm.compression.quantizers import scaled_signs, signs
from tests.codecs import context_of, jitted


def round_trip(codec: Codec, x: jax.Array) -> np.ndarray:
    codec = jitted(codec)
    context = context_of(codec, x)
    payload, _ = codec.encode(context, x)
    assert payload.bits.dtype == jnp.uint32 and payload.bits.shape == (-(-x.size // 32),)
    decoded = codec.decode(context.received(), payload)
    assert decoded.dtype == jnp.float32 and decoded.shape == x.shape
    return np.asarray(decoded, np.float64)


@pytest.mark.parametrize("shape", [(), (0,), (33,), (4, 8, 3)], ids=str)
def test_signs_against_numpy(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).choice([-2.0, -1e-30, -0.0, 0.0, 1e-30, 5.0], size=shape)
    expected = np.where(x >= 0, 1.0, -1.0)
    given = jnp.asarray(x, jnp.float32)
    plain = round_trip(signs(), given)
    np.testing.assert_array_equal(plain[x != 0], expected[x != 0])
    np.testing.assert_array_equal(np.abs(plain), 1)  # A coin, where it is 0.
    magnitude = np.abs(x).mean() if x.size else 0.0
    np.testing.assert_allclose(round_trip(scaled_signs(), given), magnitude * expected, rtol=1e-6)


@pytest.mark.parametrize("scale", [3e38, 1e37, 1.0, 1e-20, 2e-37])
def test_the_mean_magnitude_of_any_size(scale: float) -> None:
    x = np.tile([scale, -scale / 2, scale, -scale / 2], 2000)
    result = round_trip(scaled_signs(), jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(result, 0.75 * scale * np.sign(x), rtol=1e-5)
    assert not np.any(round_trip(scaled_signs(), jnp.zeros(5)))


def test_plain_signs_are_refused_under_feedback() -> None:
    x = jnp.ones(3)
    for codec in (error_feedback(signs()), error_feedback(momentum(scaled_signs()))):
        with pytest.raises(ValueError, match="no bound is known"):
            codec.encode(Context.of(x, memory=codec.init(x)), x)


@pytest.mark.parametrize("decay", [-0.1, 1.0, True, "0.9", jnp.float32(0.5)])
def test_decays_that_are_none(decay: object) -> None:
    with pytest.raises(ValueError, match="`momentum` must be a Python float in"):
        momentum(signs(), momentum=decay)


def test_momentum_outside_of_feedback_loses_nothing() -> None:
    codec = momentum(error_feedback(scaled_signs()), momentum=0.5)
    given = np.random.default_rng(1).normal(size=(6, 20)).astype(np.float32)
    memory, sent, average, total = codec.init(jnp.asarray(given[0])), 0.0, 0.0, 0.0
    for x in given:
        average = 0.5 * average + 0.5 * x
        total = total + average
        context = context_of(codec, jnp.asarray(x), memory=memory)
        payload, memory = codec.encode(context, jnp.asarray(x))
        sent = sent + np.asarray(codec.decode(context.received(), payload))
        np.testing.assert_allclose(memory.own.kept, average, atol=1e-6)
        np.testing.assert_allclose(sent + memory.own.inner.kept, total, atol=1e-5)
