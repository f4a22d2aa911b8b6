"""Dithered payloads are decoded onto a sum as they are decoded and added."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm import Context
from jaxcomm.compression.quantizers import dither


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "divisor"), [(4, 8.0), (8, 3.0)])
def test_the_decoded_array_is_added(bits: int, divisor: float) -> None:
    codec, x = dither(bits=bits), jnp.asarray(np.random.default_rng(bits).normal(size=100))
    context = Context.of(x)
    context = context.replace(statistics=codec.measure(context, x))
    payload, _ = codec.encode(context, x)
    add, total = codec.fast.add, jnp.linspace(-1.0, 1.0, 100, dtype=jnp.float32)
    assert add is not None
    actual = add(context, payload, total, divisor)
    expected = total + codec.decode(context, payload) / divisor
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2.0**-20)
    assert np.abs(np.asarray(actual - total)).max() > 0.05
