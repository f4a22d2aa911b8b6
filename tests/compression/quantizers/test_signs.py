"""Signs: zeros, magnitudes that neither overflow nor vanish, and why plain ones get no feedback."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.compression.quantizers import scaled_signs, signs
from tests.codecs import payload_of, sent
from tests.slow import slow


@pytest.mark.parametrize("shape", [(4, 8, 3), slow(()), slow((0,)), slow((33,))], ids=str)
def test_signs_against_numpy(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).choice([-2.0, -1e-30, -0.0, 0.0, 1e-30, 5.0], size=shape)
    expected = np.where(x >= 0, 1.0, -1.0)
    plain = sent(signs(), x)
    np.testing.assert_array_equal(plain[x != 0], expected[x != 0])
    np.testing.assert_array_equal(np.abs(plain), 1)  # A random sign, where it is 0.
    magnitude = np.abs(x).mean() if x.size else 0.0
    np.testing.assert_allclose(sent(scaled_signs(), x), magnitude * expected, rtol=1e-6)
    for codec in (signs(), scaled_signs()):
        bits = payload_of(codec, shape).bits
        assert bits.dtype == jnp.uint32 and bits.shape == (-(-x.size // 32),)


@pytest.mark.parametrize("scale", [3e38, 1e-20, 2e-37])
def test_the_mean_magnitude_of_any_size(scale: float) -> None:
    x = np.tile([scale, -scale / 2, scale, -scale / 2], 2000)
    np.testing.assert_allclose(sent(scaled_signs(), x), 0.75 * scale * np.sign(x), rtol=1e-5)
